"""Why do trainer and rollout engine disagree? The start-up contract test alone, one factor switched at a time.

    python tools/diagnose_mismatch.py RECIPE [section.field=value ...] [--engine transformers|vllm|vllm_server]
    python tools/diagnose_mismatch.py configs/recipe/quickstart.yaml model.start_from=null --self-test

Builds the trainer on the recipe's grid of processes and its engine, pushes the weights, lets the engine draw and score short
completions, and prints how far its log-probs are from the trainer's: as configured, then with one thing switched in each
row, and the causes by the share of the gap that they explain. ``--self-test`` plants one fault after the other in an
embedded engine and shows whether each is found and named. Run it from the repository's root. It exits with 0 when the two
sides agree (the faults are all named), else with 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megatron_gcpo.cluster import launch
from megatron_gcpo.config import Config, load
from megatron_gcpo.usage import exit_code

if TYPE_CHECKING:
    from megatron_gcpo.contract.diagnosis import Cause, Evidence, Gaps
    from megatron_gcpo.contract.faults import Finding
    from megatron_gcpo.run import Run


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(argv)
    if launch.is_worker():
        return launch.run_worker(lambda: _work(arguments))
    return exit_code(lambda: _start_ranks(arguments, argv))


def _start_ranks(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    config = _config(arguments)
    with tempfile.TemporaryDirectory(prefix="diagnose_") as logs:
        return min(1, launch.run(config.cluster, argv, log_dir=Path(logs), module="tools.diagnose_mismatch"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="section.field=value, or a piece such as cluster/cpu_tp2")
    parser.add_argument("--engine", choices=("transformers", "vllm", "vllm_server"), help="instead of rollout.engine")
    parser.add_argument("--self-test", action="store_true", help="plant faults and see whether they are named")
    return parser


def _config(arguments: argparse.Namespace) -> Config:
    overrides = list(arguments.overrides)
    if arguments.self_test:
        overrides += ["rollout.engine=transformers", "rollout.dtype=null"]
    elif arguments.engine:
        overrides.append(f"rollout.engine={arguments.engine}")
    return load(arguments.recipe, overrides)


def _work(arguments: argparse.Namespace) -> int:
    from megatron_gcpo.cluster.platform import install

    config = _config(arguments)
    platform = install(config.cluster.platform)
    from megatron_gcpo.cluster import topology
    from megatron_gcpo.cluster.deadline import Watch
    from megatron_gcpo.run import assemble

    ranks = topology.init(config.cluster, platform)
    with Watch(ranks.store, ranks.rank, ranks.world_size, config.cluster.collective_timeout_s) as watch:
        with watch.phase("assemble"), tempfile.TemporaryDirectory() as folder:
            run = assemble(config, ranks, watch, Path(folder))
        try:
            with watch.phase("compare trainer and engine"):
                (_self_test if arguments.self_test else _diagnose)(run)
        finally:
            run.close()
    ranks.close()
    return 0


def _diagnose(run: Run) -> None:
    from megatron_gcpo.contract.check import explain
    from megatron_gcpo.contract.diagnosis import diagnose, keeps
    from megatron_gcpo.contract.measure import measure
    from megatron_gcpo.reshard.check import NO_LIMIT

    run.push(run.starting_probe(), version=0, limit=NO_LIMIT)
    evidence = measure(run, switch_all=True)
    sound = keeps(evidence)
    if run.is_first:
        console = Console()
        console.print(_measurements(evidence))
        if sound:
            console.print(f"trainer and engine agree: the limit is {evidence.limit}")
        else:
            console.print(_causes(diagnose(evidence)))
    if not sound:
        raise ValueError(explain(evidence))


def _self_test(run: Run) -> None:
    from megatron_gcpo.contract.faults import FAULTS, find_planted

    findings = [find_planted(run, fault) for fault in FAULTS]
    if run.is_first:
        Console().print(_planted(findings))
    if wrong := [finding.fault for finding in findings if not finding.right]:
        raise ValueError(f"not named, or named where there is none: {', '.join(wrong)}")


def _measurements(evidence: Evidence) -> Table:
    tokens = evidence.base.drawn.num_tokens
    table = Table(
        "switched", "factor", "drawn: max", "mean", "scored: max", "mean", title=f"gaps over {tokens} tokens, nats"
    )
    table.add_row("nothing", "", *_numbers(evidence.base), style="bold")
    for switch in evidence.switches:
        table.add_row(switch.setting, switch.factor, *_numbers(switch.gaps))
    table.caption = (
        f"limit {evidence.limit} (rollout.max_logprob_gap). drawn: log-probs the engine reported with its tokens; "
        "scored: what it says of given tokens; both against the trainer"
    )
    return table


def _numbers(gaps: Gaps) -> tuple[str, ...]:
    return tuple(f"{value:.2g}" for gap in (gaps.drawn, gaps.scored) for value in (gap.max, gap.mean))


def _causes(causes: Sequence[Cause]) -> Table:
    table = Table("cause", "explains", "because", "to mend it", show_lines=True)
    for cause in causes:
        table.add_row(cause.factor, f"{cause.explains:.0%}", cause.finding, cause.remedy)
    return table


def _planted(findings: Sequence[Finding]) -> Table:
    from megatron_gcpo.contract.faults import FAULTS, NO_FAULT

    table = Table("planted", "largest gap", "named", "explains", "expected", "", title="planted faults")
    for finding in findings:
        base = finding.evidence.base
        named = finding.causes[0] if finding.causes else None
        table.add_row(
            finding.fault,
            f"{max(base.drawn.max, base.scored.max):.2g}",
            named.factor if named else "-",
            f"{named.explains:.0%}" if named else "-",
            "-" if finding.fault == NO_FAULT else FAULTS[finding.fault].factor,
            "right" if finding.right else "WRONG",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())

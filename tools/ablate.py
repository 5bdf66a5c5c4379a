"""Run grids of runs and say what they show.

    python tools/ablate.py configs/ablation/group_size.yaml
    python tools/ablate.py configs/ablation/*.yaml --summarize          # only what is finished, nothing is started
    python tools/ablate.py FILE --set run.steps=5 --seeds 0 --output runs/trial    # the same grid, small
    python tools/ablate.py FILE --slurm timeout_min=600 gpus_per_node=8 slurm_partition=h100

Every cell runs once: finished ones are not repeated, interrupted ones go on. A cell that fails is listed and stops nobody
else. Each ablation writes summary.md, summary.json and plots into runs/ablation/NAME.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from megatron_gcpo.ablate.execute import Stopped, run_here
from megatron_gcpo.ablate.grid import AblationConfig, load_ablation
from megatron_gcpo.ablate.jobs import Failure, cell_jobs, check_settings, is_finished, unfinished, warm_starts
from megatron_gcpo.ablate.plots import draw
from megatron_gcpo.ablate.slurm import Queue, submit
from megatron_gcpo.ablate.summarize import fit_trends, markdown, summarize, table, trend_table
from megatron_gcpo.evaluate.intervals import finite
from megatron_gcpo.usage import exit_code, make_console


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return exit_code(lambda: _ablate_all(arguments, make_console()))


def _ablate_all(arguments: argparse.Namespace, console: Console) -> int:
    ablations = [
        load_ablation(path, seeds=arguments.seeds, set=arguments.set, warm_start_set=arguments.warm_start_set)
        for path in arguments.files
    ]
    failed = 0
    try:
        for ablation in ablations:
            failed += _ablate(ablation, Path(arguments.output) / ablation.name, arguments, console)
    except Stopped as stopped:
        console.print(f"{stopped}: all runs have ended; the same command goes on", highlight=False)
        return 128 + stopped.signal
    return 1 if failed else 0


def _ablate(ablation: AblationConfig, root: Path, arguments: argparse.Namespace, console: Console) -> int:
    starts, cells = warm_starts(ablation, root), cell_jobs(ablation, root)
    finished = sum(is_finished(job.folder) for job in cells)
    console.print(f"{ablation.name}: {len(cells)} runs, {finished} of them finished", highlight=False)
    # a warm start that other runs share is whatever its owner made of it
    check_settings([*(starts if ablation.warm_start_for or ablation.warm_start_set else []), *cells])
    failures: list[Failure] = []
    if arguments.slurm is not None and not arguments.summarize:
        queue = Queue(
            name=ablation.name,
            root=root,
            cluster=arguments.cluster,
            at_once=ablation.at_once,
            parameters=_parameters(arguments.slurm),
        )
        submitted, queued = submit(queue, starts, cells)
        console.print(f"{len(submitted)} runs were submitted, {len(queued)} are in the queue already", highlight=False)
        if queue.cluster == "slurm":
            console.print("run again with --summarize when they are done")
            return 0
    elif not arguments.summarize:
        failures = run_here(
            [*starts, *cells],
            ablation.at_once,
            lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
        )
    known = {failure.job.folder for failure in failures}
    failures += [failure for failure in unfinished(cells) if failure.job.folder not in known]
    _report(ablation, root, failures, console)
    return len(failures)


def _report(ablation: AblationConfig, root: Path, failures: Sequence[Failure], console: Console) -> None:
    rows = summarize(ablation, root)
    lines = fit_trends(ablation, rows)
    if rows:
        console.print(table(ablation, rows))
        if lines:
            console.print(trend_table(ablation, lines))
        (root / "summary.md").write_text(markdown(ablation, rows, lines, failures), encoding="utf-8")
        content = {"rows": [asdict(row) for row in rows], "trends": [asdict(line) for line in lines]}
        (root / "summary.json").write_text(json.dumps(finite(content), indent=1, default=str), encoding="utf-8")
        plots = draw(ablation, rows, lines, root)
        names = ["summary.md", "summary.json", *(path.name for path in plots)]
        console.print(f"written to {root}: {', '.join(names)}", highlight=False, soft_wrap=True)
    else:
        console.print("nothing is finished yet")
    for failure in failures:
        console.print(
            f"not finished: {failure.job.name}: {failure.reason}", markup=False, highlight=False, soft_wrap=True
        )


def _parameters(pairs: Sequence[str]) -> dict[str, Any]:
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--slurm {pair!r} has no '=': write name=value, names are submitit's")
    return {name: yaml.safe_load(value) for name, _, value in (pair.partition("=") for pair in pairs)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="YAML files, e.g. configs/ablation/group_size.yaml")
    parser.add_argument("--output", default="runs/ablation")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="instead of the file's")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="FIELD=VALUE", help="overrides of every run of the grid"
    )
    parser.add_argument(
        "--warm-start-set", nargs="+", default=[], metavar="FIELD=VALUE", help="overrides of the warm starts"
    )
    parser.add_argument("--summarize", action="store_true", help="start nothing")
    parser.add_argument("--slurm", nargs="*", metavar="NAME=VALUE", help="submit through submitit with its parameters")
    parser.add_argument("--cluster", default="slurm", choices=["slurm", "local"], help="submitit's executor")
    return parser


if __name__ == "__main__":
    sys.exit(main())

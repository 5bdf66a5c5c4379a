"""Did a run learn its task or its reward? What the verifier declares, and signs of reward hacking in what was saved.

    python tools/audit_rewards.py runs/quickstart

Reads metrics and rollouts, and judges a few empty and constant completions with the run's own verifier. Exit status: 0
nothing found, 1 something is flagged, 2 the audit is not possible. The findings are also written to RUN/audit.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_gcpo.config.records import SourceConfig, VerifyConfig
from megatron_gcpo.data.records import Item
from megatron_gcpo.data.sources import SOURCES
from megatron_gcpo.observe import audit
from megatron_gcpo.observe.history import GROUPED, History, read_history, read_rollouts
from megatron_gcpo.observe.replay import COLUMNS, saved_groups
from megatron_gcpo.types import Group, Prompt, Rollout
from megatron_gcpo.usage import exit_code
from megatron_gcpo.verify.label import RewardLabel
from megatron_gcpo.verify.pool import VerifierPool
from megatron_gcpo.verify.table import VERIFIERS, find


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the folder of a run that saved its rollouts (observe.rollouts)")
    parser.add_argument("--problems", type=int, default=64, help="training problems that are judged anew")
    arguments = parser.parse_args(argv)
    return exit_code(lambda: _audit(Path(arguments.run), arguments.problems))


def _audit(folder: Path, num_problems: int) -> int:
    label, findings = audited(folder, num_problems)
    _print(folder, label, findings)
    _write(folder / "audit.json", label, findings)
    return int(any(finding.flagged for finding in findings))


def audited(folder: Path, num_problems: int) -> tuple[RewardLabel, list[audit.Finding]]:
    """The verifier's label and every measure. ValueError: no run, a configuration of another version, or no label."""
    history = read_history(folder)
    verify = VerifyConfig.model_validate(_section(history, "verify"))
    label = label_of(verify.name)
    table, _ = read_rollouts(history.rollout_files, COLUMNS, needed=(*GROUPED, "text", "reward"))
    groups = saved_groups(table)
    if not groups:
        raise ValueError(f"{folder} has no saved rollouts: set observe.rollouts")
    data = _section(history, "data")
    training, heldout = (_items(data.get(part)) for part in ("train", "heldout"))
    known = {group.prompt_id for group in groups}
    seen = [item for item in training if item.id in known][:num_problems]
    if not seen:
        raise ValueError(f"the saved rollouts of {folder} are of other problems than data.train has now")
    limits, judged = audit.Limits(), [_problem(item) for item in seen]
    with VerifierPool(verify) as pool:
        judge = _judge(pool, {item.id: item for item in seen})
        probes = [audit.format_only(judged, judge), audit.constant_output(groups, judged, judge, limits)]
    findings = [
        audit.gap(history, limits),
        audit.length_correlation(groups, limits),
        *probes,
        audit.overlap([_problem(item) for item in training], [_problem(item) for item in heldout]),
    ]
    return label, findings


def label_of(verifier: str) -> RewardLabel:
    """What the verifier declares of its reward; ValueError when it declares nothing."""
    label = find(verifier, VERIFIERS).label
    if label is None:
        raise ValueError(
            f"verifier {verifier} declares nothing of its reward, so there is nothing to audit it against: give its row in "
            "verify/table.py a label"
        )
    return label


def _judge(pool: VerifierPool, items: dict[str, Item]) -> audit.Judge:
    def judge(wanted: Sequence[tuple[str, Sequence[str]]]) -> list[np.ndarray]:
        groups = [_group(items[name], completions) for name, completions in wanted]
        return [verdict.rewards_G.astype(np.float64) for verdict in pool.score(groups)]

    return judge


def _group(item: Item, completions: Sequence[str]) -> Group:
    prompt = Prompt(id=item.id, token_ids=(), text=_text(item), answer=item.answer, extras=item.extras)
    nothing = {
        "token_ids": np.zeros(0, np.int64),
        "logprobs": np.zeros(0, np.float32),
        "versions_T": np.zeros(0, np.int32),
    }
    rollouts = [Rollout(text=text, finish_reason="stop", **nothing) for text in completions]
    return Group(prompt=prompt, rollouts=tuple(rollouts))


def _items(section: object) -> list[Item]:
    if section is None:
        return []
    source = SourceConfig.model_validate(section)
    return [item for item in islice(SOURCES[source.kind](source), source.limit) if isinstance(item, Item)]


def _problem(item: Item) -> audit.Problem:
    return audit.Problem(id=item.id, text=_text(item), answer=item.answer)


def _text(item: Item) -> str:
    return item.prompt if isinstance(item.prompt, str) else item.prompt[-1]["content"]


def _section(history: History, name: str) -> dict[str, object]:
    section = history.config.get(name)
    if not isinstance(section, dict):
        raise ValueError(f"{history.folder} has no configuration with a section {name}: config.yaml is missing or torn")
    return section


def _print(folder: Path, label: RewardLabel, findings: Sequence[audit.Finding]) -> None:
    console = Console()
    kind = f"{label.paradigm}-based, {label.granularity}, {'verifiable' if label.verifiable else 'not verifiable'}"
    console.print(f"reward: {kind}, in [{label.low:g}, {label.high:g}]", highlight=False)
    for exploit in label.exploits:
        console.print(f"  known exploit: {exploit}", highlight=False, markup=False)
    table = Table(title=f"{folder}: audit of the reward", title_justify="left")
    for column in ("", "measured", "", "detail"):
        table.add_column(column)
    for finding in findings:
        shown = "-" if finding.value is None else f"{finding.value:+.3f}"
        table.add_row(finding.name, shown, "FLAGGED" if finding.flagged else "", Text(finding.detail))
    console.print(table)


def _write(path: Path, label: RewardLabel, findings: Sequence[audit.Finding]) -> None:
    rows = {"label": asdict(label), "findings": [asdict(finding) for finding in findings]}
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())

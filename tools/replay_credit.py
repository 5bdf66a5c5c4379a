"""What other methods would have paid the rollouts of a run: rank changes, and who gains. No model is loaded.

    python tools/replay_credit.py runs/quickstart --method gcpo,grpo,darling --value logdet,det --c 0.5,1,2

Embeddings are computed once and kept in RUN/replay/; the table is written to RUN/replay/credit.json for the report.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from megatron_gcpo.embed.kept import KeptEncoder
from megatron_gcpo.methods import resolve
from megatron_gcpo.observe import replay
from megatron_gcpo.observe.history import History, read_history, read_rollouts
from megatron_gcpo.usage import exit_code, make_console


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return exit_code(lambda: _replay(arguments, make_console()))


def _replay(arguments: argparse.Namespace, console: Console) -> None:
    folder = Path(arguments.run)
    history = read_history(folder)
    config, unknown = replay.embed_config(history, encoder=arguments.encoder, span=arguments.span)
    skipped = [*history.skipped, *unknown]
    variants = replay.make_variants(
        arguments.method.split(","),
        arguments.value.split(","),
        [float(c) for c in arguments.c.split(",")],
        {name: _section(name, history, skipped) for name in arguments.method.split(",")},
    )
    files = [f for f in history.rollout_files if arguments.first_step <= f.step <= arguments.last_step]
    table, torn = read_rollouts(files, replay.COLUMNS, needed=replay.COLUMNS)
    groups = replay.saved_groups(table)
    for line in (*skipped, *torn):
        console.print(f"skipped: {line}", highlight=False, markup=False, soft_wrap=True)
    if not groups:
        raise ValueError(f"{folder} has no saved rollouts that can be replayed, in {len(files)} files")
    encoded = 0
    if any(variant.compares for variant in variants):
        encoder = KeptEncoder(config, folder / "replay")
        groups = replay.embed(groups, encoder, config.span)
        encoded = encoder.num_encoded
    results = []
    start_s = time.monotonic()
    for variant in variants:
        paid = [replay.pay(group, variant).numpy() for group in groups]
        results.append((replay.compare(groups, variant.label, paid), replay.movers(groups, paid)))
    seconds = time.monotonic() - start_s
    trained = replay.compare(groups, replay.AS_TRAINED, [group.advantages_G for group in groups])
    console.print(_table([trained, *(comparison for comparison, _ in results)], folder))
    rate = len(groups) * len(variants) / max(seconds, 1e-9) * 60
    console.print(
        f"{len(groups)} groups x {len(variants)} variants at {rate:,.0f} groups a minute; {encoded} texts were encoded",
        highlight=False,
    )
    _write(folder / "replay" / "credit.json", trained, results)


def _section(name: str, history: History, skipped: list[str]) -> dict[str, Any]:
    """The run's own section for its own method, else configs/method/NAME.yaml, else the defaults."""
    section = history.config.get("method")
    if isinstance(section, dict) and section.get("name") == name:
        try:
            resolve(section)
        except ValueError as error:  # of another version
            skipped.append(f"config.yaml: its method section ({str(error).splitlines()[0]})")
        else:
            return {key: value for key, value in section.items() if key != "name"}
    path = Path("configs/method") / f"{name}.yaml"
    piece = yaml.safe_load(path.read_text(encoding="utf-8"))["method"] if path.is_file() else {}
    return {key: value for key, value in piece.items() if key != "name"}


def _table(comparisons: Sequence[replay.Comparison], folder: Path) -> Table:
    table = Table(title=f"{folder}: credit replayed", title_justify="left")
    kinds = list(dict.fromkeys(kind for c in comparisons for kind in c.mean_advantage))
    for column in ("", "signal", "reordered", "signs changed", *(kind.replace("_", "\n") for kind in kinds)):
        table.add_column(column, justify="right" if column else "left")
    for c in comparisons:
        shares = (c.groups_with_signal, c.pairs_reordered, c.signs_changed)
        means = (f"{c.mean_advantage[kind]:+.3f}" if kind in c.mean_advantage else "-" for kind in kinds)
        table.add_row(c.label, *(f"{share:.3f}" for share in shares), *means)
    return table


def _write(
    path: Path, trained: replay.Comparison, results: Sequence[tuple[replay.Comparison, list[replay.Mover]]]
) -> None:
    rows = [{**asdict(trained), "movers": []}]
    rows += [{**asdict(comparison), "movers": [asdict(m) for m in moved]} for comparison, moved in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    unfinished.replace(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the folder of a run that saved its rollouts (observe.rollouts)")
    parser.add_argument("--method", default="gcpo,grpo", help="comma-separated names of methods")
    parser.add_argument("--value", default="logdet", help="team values, for methods that have the option")
    parser.add_argument("--c", default="10", help="kernel scales, for methods that have the option")
    parser.add_argument("--encoder", help="default: the run's own")
    parser.add_argument("--span", choices=["completion", "reasoning", "wording"], help="default: the run's own")
    parser.add_argument("--first-step", type=int, default=0)
    parser.add_argument("--last-step", type=int, default=sys.maxsize)
    return parser


if __name__ == "__main__":
    sys.exit(main())

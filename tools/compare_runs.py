"""Train several methods from one warm start with the same seeds and print them side by side, on held-out problems.

    python tools/compare_runs.py --methods grpo gcpo --seeds 0 1 2

Every run is the same recipe with another ``method/NAME`` piece and seed: same warm start, prompts, optimizer, loss
aggregation and number of steps. Finished runs are not repeated, interrupted ones go on.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_gcpo.observe.summary import Summary, read_summary

SHOWN = ("pass@1", "pass@8", "distinct@8", "effective_strategies", "vendi", "mean_tokens")


def main() -> int:
    arguments = _arguments()
    subprocess.run([*COMMAND, arguments.warm_start], check=True)
    finished: dict[str, list[Summary]] = {}
    for seed in arguments.seeds:
        for method in arguments.methods:
            summary = _train(arguments, method, seed)
            finished.setdefault(method, []).append(summary)
            Console().print(f"{method} seed {seed}: {_one_line(summary)}", highlight=False)
    Console().print(_table(finished, arguments.seeds))
    return 0


COMMAND = (sys.executable, "-m", "megatron_gcpo.cli", "train")


def _train(arguments: argparse.Namespace, method: str, seed: int) -> Summary:
    folder = Path(arguments.output) / f"{method}_seed{seed}"
    settings = [f"method/{method}", f"run.seed={seed}", f"run.output_dir={folder}", f"run.name={folder.name}"]
    command = [*COMMAND, arguments.recipe, *settings, *arguments.set]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = read_summary(folder)
    assert summary is not None, f"got no summary in {folder}, expected one of the run that just ended"
    return summary


def _one_line(summary: Summary) -> str:
    after = summary.after or {}
    return "  ".join(f"{name} {after[name]:.3f}" for name in SHOWN if name in after)


def _table(finished: dict[str, list[Summary]], seeds: Sequence[int]) -> Table:
    table = Table(title=f"held-out problems, mean ± standard deviation over {len(seeds)} seeds", title_justify="left")
    table.add_column("")
    for column in ("before", *finished):
        table.add_column(column, justify="right")
    for name in SHOWN:
        cells = []
        before = [s.before[name] for runs in finished.values() for s in runs if s.before and name in s.before]
        for values in (
            before,
            *([s.after[name] for s in runs if s.after and name in s.after] for runs in finished.values()),
        ):
            cells.append(_spread(values))
        table.add_row(name, *cells)
    return table


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {spread:.3f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["grpo", "gcpo"], help="pieces of configs/method")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--recipe", default="configs/recipe/quickstart.yaml")
    parser.add_argument("--warm-start", default="configs/recipe/quickstart_warm_start.yaml")
    parser.add_argument("--output", default="runs/compare")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="overrides for every run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Train several methods from one warm start with the same seeds and print them side by side, on held-out problems.

    python tools/compare_runs.py --methods grpo gcpo --seeds 0 1 2

Every run is the same recipe with another ``method/NAME`` piece and seed: same warm start, prompts, optimizer, loss
aggregation and number of steps. A method that is another one under the recipe's shared settings keeps its own, which is
said. Finished runs are not repeated, interrupted ones go on. Below each number stands its difference to the first method,
paired by seed, with its 95 % bootstrap interval over seeds (two or more).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_gcpo.config import load
from megatron_gcpo.evaluate.intervals import paired_interval
from megatron_gcpo.methods import METHODS, check_run, resolve
from megatron_gcpo.observe.summary import Summary, read_summary
from megatron_gcpo.usage import exit_code, make_console

SHOWN = {
    "pass@1": "pass@1",
    "pass@8": "pass@8",
    "distinct@8": "distinct strategies among the correct of 8",
    "effective_strategies": "effective number of strategies",
    "vendi": "coverage: Vendi score of the correct",
    "entropy": "entropy per token at the end, nats",
    "mean_tokens": "tokens of an answer",
}


def main() -> int:
    arguments = _arguments()
    return exit_code(lambda: _compare(arguments, make_console()))


def _compare(arguments: argparse.Namespace, console: Console) -> None:
    own = {method: fitting(arguments.recipe, method) for method in arguments.methods}
    for method, settings in own.items():
        if settings:
            console.print(f"{method} cannot take what the recipe sets for all: {', '.join(settings)}", highlight=False)
    _run([*COMMAND, arguments.warm_start])
    found: dict[str, list[Mapping[str, float]]] = {method: [] for method in arguments.methods}
    before: list[Mapping[str, float]] = []
    for seed in arguments.seeds:
        for method in arguments.methods:
            folder = Path(arguments.output) / f"{method}_seed{seed}"
            summary = _train(arguments, method, own[method], seed, folder)
            after = {**(summary.after or {}), **_last_entropy(folder)}
            found[method].append(after)
            before.append(summary.before or {})
            shown = "  ".join(f"{name} {after[name]:.3f}" for name in SHOWN if name in after)
            console.print(f"{method} seed {seed}: {shown}", highlight=False)
    console.print(table(before, found, len(arguments.seeds)))


COMMAND = (sys.executable, "-m", "megatron_gcpo.cli", "train")


def fitting(recipe: str, method: str) -> list[str]:
    """Overrides that give a method back its own value of a shared setting that it refuses; [] for most.

    Raises ValueError when that is not enough.
    """
    own = ["train.mini_batches=2"]
    if method in METHODS:
        defaults = METHODS[method].options()
        own += [f"method.group_filter={defaults.group_filter}".lower(), f"method.loss.reduce={defaults.loss.reduce}"]
    problem = ""
    for overrides in ([], *([setting] for setting in own), own[1:]):
        try:
            config = load(recipe, [f"method/{method}", *overrides])
            check_run(*resolve(config.method), config)
        except ValueError as error:
            problem = problem or str(error)
        else:
            return overrides
    raise ValueError(problem)


def _train(arguments: argparse.Namespace, method: str, own: Sequence[str], seed: int, folder: Path) -> Summary:
    settings = [f"method/{method}", f"run.seed={seed}", f"run.output_dir={folder}", f"run.name={folder.name}", *own]
    _run([*COMMAND, arguments.recipe, *settings, *arguments.set], stdout=subprocess.DEVNULL)
    summary = read_summary(folder)
    assert summary is not None, f"got no summary in {folder}, expected one of the run that just ended"
    return summary


def _run(command: Sequence[str], stdout: int | None = None) -> None:
    if code := subprocess.run(command, check=False, stdout=stdout).returncode:
        raise ValueError(f"a run ended with exit code {code}, see above; the same command goes on: {' '.join(command)}")


def _last_entropy(folder: Path) -> dict[str, float]:
    """Of the policy on its own rollouts, in the last step that trained."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    entropies = [row["train/entropy"] for row in rows if "train/entropy" in row]
    return {"entropy": entropies[-1]} if entropies else {}


def table(
    before: Sequence[Mapping[str, float]], found: Mapping[str, Sequence[Mapping[str, float]]], seeds: int
) -> Table:
    """Mean and standard deviation over seeds, and below it the paired difference to the first method."""
    title = f"held-out problems, mean ± standard deviation over {seeds} seeds; below: difference to {next(iter(found))}"
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for column in ("before", *found):
        shown.add_column(column, justify="right")
    baseline = next(iter(found.values()))
    for name, meaning in SHOWN.items():
        cells = [_spread([values[name] for values in before if name in values])]
        for runs in found.values():
            values = [run[name] for run in runs if name in run]
            cell = _spread(values)
            if runs is not baseline and len(values) == len([run for run in baseline if name in run]) > 0:
                cell += f"\n{paired_interval(values, [run[name] for run in baseline if name in run]).signed()}"
            cells.append(cell)
        shown.add_row(meaning, *cells)
    return shown


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

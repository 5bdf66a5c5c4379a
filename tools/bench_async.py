"""Steps per hour and final accuracy of synchronous training against drawing ahead, on the quick-start task.

    python tools/bench_async.py [--steps 24] [--lags 0 1] [--seeds 0] [--set FIELD=VALUE ...]

One trainer process and, with a lag, one engine process: with two cores each of them is bound to its own, and at lag 0 the
trainer, which then holds the engine, to the first. Runs alternate, so that a busy machine disturbs all of them alike; the
first two steps of each are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from megatron_gcpo.observe.summary import read_summary

NOT_COUNTED = 2
ENGINE = "megatron_gcpo.rollout.engine_worker"
DRAWING = ("generate",)
TRAINING = ("verify", "embed", "credit", "logprobs", "prepare", "update", "push")


def main() -> int:
    arguments = _arguments()
    if not arguments.start_from:
        subprocess.run([*COMMAND, "configs/recipe/quickstart_warm_start.yaml", "cluster/cpu_single"], check=True)
    results: dict[int, list[dict[str, float]]] = {lag: [] for lag in arguments.lags}
    for seed in arguments.seeds:
        for lag in arguments.lags:
            results[lag].append(_measure(arguments, lag, seed))
    Console().print(_table(results))
    return 0


COMMAND = (sys.executable, "-m", "megatron_gcpo.cli", "train")


def _measure(arguments: argparse.Namespace, lag: int, seed: int) -> dict[str, float]:
    folder = Path(arguments.output) / f"lag{lag}_seed{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    settings = [
        "cluster/cpu_single",
        "cluster.threads_per_process=1",
        f"method/{arguments.method}",
        f"run.steps={arguments.steps}",
        f"run.seed={seed}",
        f"run.output_dir={folder}",
        f"rollout.max_policy_lag={lag}",
        f"checkpoint.every={arguments.steps}",
        "evaluate.at_start=false",
        *([f"model.start_from={arguments.start_from}"] if arguments.start_from else []),
        *arguments.set,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*COMMAND, arguments.recipe, *settings], stdout=subprocess.DEVNULL, env=environment)
    done = threading.Event()
    binding = threading.Thread(target=_bind, args=(process.pid, done))
    binding.start()
    code = process.wait()
    done.set()
    binding.join()
    if code:
        sys.exit(f"the run of lag {lag}, seed {seed} failed with code {code}")
    return _read(folder)


def _bind(pid: int, done: threading.Event) -> None:
    """The engine's process to the second core, all others of the run to the first, as they appear."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    bound: set[int] = set()
    while not done.wait(0.5):
        with contextlib.suppress(psutil.Error, OSError):
            for process in psutil.Process(pid).children(recursive=True):
                if process.pid in bound:
                    continue
                core = cores[1] if ENGINE in process.cmdline() else cores[0]
                for thread in os.listdir(f"/proc/{process.pid}/task"):
                    os.sched_setaffinity(int(thread), {core})
                bound.add(process.pid)


def _read(folder: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/total_s" in row][NOT_COUNTED:]
    summary = read_summary(folder)
    assert summary is not None, f"got no summary in {folder}, expected one of the run that just ended"

    def mean(name: str) -> float:
        values = [row[name] for row in steps if name in row]
        return statistics.fmean(values) if values else float("nan")

    after: Any = summary.after or {}
    return {
        "steps per hour": 3600 / mean("time/total_s"),
        "seconds a step": mean("time/total_s"),
        "drawing, s": mean("lag/drawing_s") if "lag/drawing_s" in steps[0] else mean("time/generate_s"),
        "waiting for rollouts, s": sum(mean(f"time/{phase}_s") for phase in DRAWING),
        "training, s": sum(mean(f"time/{phase}_s") for phase in TRAINING),
        "share of drawing nobody waited for": mean("lag/overlap_share"),
        "mean lag of a token": mean("lag/mean"),
        "KL(rollout || old), k3": mean("correction/kl_k3"),
        "held-out pass@1 after": after.get("pass@1", float("nan")),
    }


def _table(results: dict[int, list[dict[str, float]]]) -> Table:
    table = Table(title="quick-start task, one core per process", title_justify="left")
    table.add_column("")
    for lag in results:
        table.add_column(f"lag {lag}", justify="right")
    for name in next(iter(results.values()))[0]:
        table.add_row(name, *(_cell([run[name] for run in runs]) for runs in results.values()))
    if 0 in results:
        base = [run["steps per hour"] for run in results[0]]
        ratios = {
            lag: [r["steps per hour"] / b for r, b in zip(runs, base, strict=True)] for lag, runs in results.items()
        }
        table.add_row("steps per hour over lag 0", *(_cell(values) for values in ratios.values()))
    return table


def _cell(values: list[float]) -> str:
    values = [v for v in values if v == v]
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.3g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4g}{spread}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--method", default="gcpo", help="piece of configs/method")
    parser.add_argument("--recipe", default="configs/recipe/quickstart.yaml")
    parser.add_argument("--start-from", help="a run to start from instead of the quick start's warm start")
    parser.add_argument("--output", default="runs/bench_async")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="overrides for every run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

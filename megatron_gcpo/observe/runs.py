"""``megatron-gcpo runs``: the runs below a folder, their state, step and key numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from megatron_gcpo.observe.history import History, read_history
from megatron_gcpo.observe.summary import FILE

ACTIVE_S = 600.0
"""A run that has written nothing for this long is taken to have stopped."""
SHOWN = ("pass@1", "pass@8", "distinct@8")
MARKS = ("config.yaml", "metrics.jsonl", FILE)
"""A folder with two of these is a run; one alone may be anybody's."""


def find_runs(root: Path) -> Iterator[Path]:
    """The run folders at and below ``root``, in order of their paths; runs inside runs are not looked for."""
    if sum((root / mark).is_file() for mark in MARKS) >= 2:
        yield root
        return
    for child in sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink()):
        yield from find_runs(child)


def runs_table(root: Path, now: float | None = None) -> Table:
    """One row per run.

    Raises:
        ValueError: ``root`` is no folder, or there is no run in it.
    """
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}: give one that holds runs")
    histories = [read_history(folder) for folder in find_runs(root)]
    if not histories:
        raise ValueError(f"there is no run in {root}: give a folder that holds runs")
    table = Table("run", "state", "step", "method", "reward", *SHOWN, "s/step")
    table.columns[0].overflow = "fold"
    for history in histories:
        table.add_row(*_row(history, time.time() if now is None else now))
    return table


def state(history: History, now: float) -> str:
    """finished; active (wrote lately); or stopped before its last step, which the next ``train`` goes on from."""
    if history.finished:
        return "finished"
    quiet_s = now - history.modified
    return f"active, {quiet_s:.0f} s ago" if history.modified and quiet_s < ACTIVE_S else "stopped"


def _row(history: History, now: float) -> list[str]:
    method = history.config.get("method")
    wanted = "?" if history.steps is None else str(history.steps)
    return [
        str(history.folder),
        state(history, now),
        f"{history.step}/{wanted}",
        str(method.get("name", "?")) if isinstance(method, dict) else "?",
        _last(history, "reward/mean"),
        *(_measure(history, name) for name in SHOWN),
        _last(history, "time/total_s"),
    ]


def _measure(history: History, name: str) -> str:
    """The newest evaluation: of the end of the run, or the last one under way."""
    after = history.summary.after if history.summary else None
    return f"{after[name]:.3f}" if after and name in after else _last(history, f"eval/{name}")


def _last(history: History, name: str) -> str:
    _, values = history.series(name)
    return f"{values[-1]:.3f}" if values else "-"

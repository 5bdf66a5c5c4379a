"""``megatron-gcpo runs``: the runs below a folder, their state, step and key numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

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
    try:
        children = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    except PermissionError:  # somebody else's
        return
    for child in children:
        yield from find_runs(child)


def runs_table(root: Path, now: float | None = None) -> Group:
    """One row per run, and below them what could not be read.

    Raises:
        ValueError: ``root`` is no folder, or there is no run in it.
    """
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}: give one that holds runs")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)  # as narrow as 80 columns ask for
    table.add_column("run", overflow="fold", min_width=12)
    for column in ("state", "step", "method"):
        table.add_column(column, no_wrap=True)
    for column in ("reward", *SHOWN, "s/step"):
        table.add_column(column.replace("@", "\n@").replace("s/step", "s\n/step"), justify="right", no_wrap=True)
    notes: list[str] = []
    for folder in find_runs(root):
        try:
            history = read_history(folder)
        except ValueError as error:
            table.add_row(str(folder), "unreadable")
            notes.append(str(error))
            continue
        table.add_row(*_row(history, time.time() if now is None else now))
        notes += [f"{folder}: skipped {line}" for line in history.skipped]
    if not table.row_count:
        raise ValueError(f"there is no run in {root}: give a folder that holds runs")
    return Group(table, *(Text(note) for note in notes))


def state(history: History, now: float) -> str:
    """finished; active (wrote lately); or stopped before its last step, which the next ``train`` goes on from."""
    if history.finished:
        return "finished"
    quiet_s = now - history.modified
    return f"active, {quiet_s:.0f} s ago" if history.modified and quiet_s < ACTIVE_S else "stopped"


def _row(history: History, now: float) -> list[str]:
    wanted = "?" if history.steps is None else str(history.steps)
    return [
        str(history.folder),
        state(history, now),
        f"{history.step}/{wanted}",
        history.method,
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

"""What a person watching the run sees: a bar with four numbers on a terminal, a line now and then in a log."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES_PER_RUN = 10
"""Lines printed over a run where there is no terminal to draw a bar on."""

SHOWN = {
    "reward/mean": "reward",
    "train/nll": "loss",
    "credit/team_value": "team",
    "train/entropy": "entropy",
    "time/total_s": "s/step",
}
"""The numbers a person wants to see, by metric; no stage has more than four of them."""


class ProgressBar:
    """Context manager; ``advance`` after each step with the numbers to show."""

    def __init__(self, title: str, total: int, done: int, console: Console, shown: bool) -> None:
        self._title, self._total, self._console = title, total, console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task(title, total=total, completed=done, numbers="")
        self._lines = shown and not console.is_terminal

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that ``step`` (1-based) is done, with what SHOWN picks of its metrics."""
        shown = "  ".join(f"{label} {metrics[name]:.3g}" for name, label in SHOWN.items() if name in metrics)
        self._bar.update(self._task, completed=step, numbers=shown)
        stride = max(1, self._total // LINES_PER_RUN)
        if self._lines and (step % stride == 0 or step == self._total):
            self._console.print(f"{self._title} {step}/{self._total}  {shown}", highlight=False)

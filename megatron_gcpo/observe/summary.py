"""What is known of a run so far: saved with every checkpoint, printed at the end, read by the comparison tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

FILE = "summary.json"
CONTENTS = ("metrics.jsonl", "rollouts/", "checkpoints/", "tensorboard/", "config.yaml")
"""What a run may leave in its folder for people."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """JSON-able; the same on every rank except for the evaluations, which rank 0 has."""

    step: int = 0
    """Steps done."""
    before: Mapping[str, float] | None = None
    """Evaluation of the policy the run started from."""
    after: Mapping[str, float] | None = None
    """Evaluation after the last step."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Time spent in steps so far, by phase (rank 0)."""
    skipped_updates: int = 0
    data: str = ""
    """Fingerprint of the training prompts; a resumed run must see the same."""

    method_state: Mapping[str, Any] = field(default_factory=dict)
    """What the method's controllers and the sampler remember (run.Run.method_state)."""

    def after_step(self, seconds: Mapping[str, float], skipped_updates: int) -> Self:
        """The summary one step later."""
        total = {phase: self.phase_seconds.get(phase, 0.0) + value for phase, value in seconds.items()}
        return replace(
            self, step=self.step + 1, phase_seconds=total, skipped_updates=self.skipped_updates + skipped_updates
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, folder: Path) -> None:
        """As ``summary.json``, whole or not at all."""
        unfinished = folder / (FILE + ".tmp")
        unfinished.write_text(json.dumps(self.to_json(), indent=1), encoding="utf-8")
        unfinished.replace(folder / FILE)


def read_summary(folder: Path) -> Summary | None:
    """The summary of a run that was finished; None when there is none. Raises ValueError when it cannot be read."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return Summary(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is no summary of this version ({error}): remove it to go on from the checkpoints"
        ) from None


def print_summary(summary: Summary, title: str, folder: Path, console: Console) -> None:
    """Before and after, where the time went, and where everything is."""
    if summary.before or summary.after:
        table = Table(title=f"{title}: held-out problems", title_justify="left")
        for column in ("", *(["before"] if summary.before else []), *(["after"] if summary.after else [])):
            table.add_column(column, justify="right" if column else "left")
        evaluations = [e for e in (summary.before, summary.after) if e]
        for name in dict.fromkeys(name for e in evaluations for name in e):
            table.add_row(name, *(f"{e[name]:.3f}" if name in e else "-" for e in evaluations))
        console.print(table)
    total = summary.phase_seconds.get("total", 0.0)
    shares = [
        f"{phase} {100 * value / total:.1f}%"
        for phase, value in summary.phase_seconds.items()
        if phase != "total" and value > 0
    ]
    if total:
        text = f"time of {summary.step} steps: {total:.0f} s = {', '.join(shares)}"
        console.print(text, highlight=False, soft_wrap=True)
    if summary.skipped_updates:
        console.print(
            f"[yellow]{summary.skipped_updates} updates were skipped: loss or gradient was not finite[/yellow]"
        )
    saved = [name for name in CONTENTS if (folder / name.rstrip("/")).exists()]
    console.print(f"saved in {folder}: {', '.join(saved)}", highlight=False, soft_wrap=True)

"""What is known of a run so far: saved with every checkpoint, printed at the end, read by the comparison tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from megatron_gcpo.evaluate.report import evaluation_table

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
    under_way: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The newest two evaluations between the two: "step 50" -> metrics."""
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

    def evaluated(self, metrics: Mapping[str, float]) -> Self:
        """With an evaluation of the policy as it is now."""
        newest = {**self.under_way, f"step {self.step}": metrics}
        return replace(self, under_way=dict(list(newest.items())[-2:]))

    def evaluations(self) -> dict[str, Mapping[str, float]]:
        """The first and the newest two, oldest first, by what a person calls them."""
        later = {**self.under_way, "after": self.after}
        newest = [(heading, metrics) for heading, metrics in later.items() if metrics][-2:]
        return {**({"before": self.before} if self.before else {}), **dict(newest)}

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
        summary = Summary(**json.loads(path.read_text(encoding="utf-8")))
        _check_types(summary)
        return summary
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is no summary of this version ({error}): remove it to go on from the checkpoints"
        ) from None


def _check_types(summary: Summary) -> None:
    for name in ("before", "after", "phase_seconds"):
        values = getattr(summary, name)
        if values is None and name != "phase_seconds":
            continue
        if not isinstance(values, Mapping) or not all(isinstance(value, int | float) for value in values.values()):
            raise TypeError(f"{name} holds no numbers by name")
    if not isinstance(summary.step, int):
        raise TypeError("step is no whole number")


def print_evaluations(summary: Summary, title: str, console: Console) -> None:
    """The policy on the held-out problems: before training, lately and now, and what has changed; nothing without any."""
    found = summary.evaluations()
    if found:
        problems = list(found.values())[-1].get("prompts")
        many = "" if problems is None else f"{problems:.0f} "
        console.print(evaluation_table(f"{title}: {many}held-out problems", found))


def print_summary(summary: Summary, title: str, folder: Path, console: Console) -> None:
    """Before and after, where the time went, and where everything is."""
    print_evaluations(summary, title, console)
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

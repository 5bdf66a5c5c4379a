"""From an ablation to the runs it consists of, and how far each of them is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gcpo.ablate.grid import AblationConfig, cells, override, warm_start_folder
from megatron_gcpo.ablate.training import last_words
from megatron_gcpo.cli import run_folder
from megatron_gcpo.config import Config, load
from megatron_gcpo.observe.history import read_history
from megatron_gcpo.observe.runs import state

TRAIN = (sys.executable, "-m", "megatron_gcpo.cli", "train")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a cell of the grid, or a warm start."""

    name: str
    folder: Path
    recipe: str
    overrides: tuple[str, ...]
    start: Path | None = None
    """The folder of the warm start that it needs."""

    @property
    def command(self) -> list[str]:
        return [*TRAIN, self.recipe, *self.overrides]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A run that did not finish, and why."""

    job: Job
    reason: str


def warm_starts(ablation: AblationConfig, root: Path) -> list[Job]:
    """What the cells start from."""
    recipe, more = ablation.warm_start, ablation.warm_start_set
    if recipe is None:
        return []
    varied = ablation.warm_start_for
    if varied is None:
        folder = run_folder(load(recipe, more))
        return [Job(name="warm start", folder=folder, recipe=recipe, overrides=more)]
    return [
        Job(
            name=f"warm start of {varied} {value}",
            folder=warm_start_folder(root, value),
            recipe=recipe,
            overrides=(override(varied, value), *more, f"run.output_dir={warm_start_folder(root, value)}"),
        )
        for value in ablation.grid[varied]
    ]


def cell_jobs(ablation: AblationConfig, root: Path) -> list[Job]:
    """The runs of the grid, in the order of ``cells``."""
    varied = ablation.warm_start_for
    shared = next(iter(warm_starts(ablation, root)), None) if varied is None else None
    return [
        Job(
            name=f"{cell.name} seed {cell.seed}",
            folder=cell.folder(root),
            recipe=ablation.recipe,
            overrides=tuple(cell.overrides(ablation, root)),
            start=warm_start_folder(root, cell.values[varied]) if varied else shared and shared.folder,
        )
        for cell in cells(ablation)
    ]


def is_finished(folder: Path) -> bool:
    try:
        return read_history(folder).finished
    except ValueError:  # not begun
        return False


def unfinished(jobs: Sequence[Job]) -> list[Failure]:
    """The runs that are not finished, and how far they are."""
    found = []
    for job in jobs:
        try:
            history = read_history(job.folder)
        except ValueError:
            said = last_words(job.folder)
            found.append(Failure(job=job, reason=f"failed: {said}" if said else "not begun"))
            continue
        if not history.finished:
            said = last_words(job.folder)
            far = f"{state(history, time.time())} at step {history.step} of {history.steps or '?'}"
            found.append(Failure(job=job, reason=f"{far}: {said}" if said else far))
    return found


def check_settings(jobs: Sequence[Job]) -> None:
    """What is already there must be what the ablation asks for: results of other settings are no part of its table.

    Raises:
        ValueError: a folder holds a run with other settings; says which.
    """
    for job in jobs:
        if differences := _differences(job):
            raise ValueError(
                f"{job.folder} holds a run with other settings ({'; '.join(differences[:4])}): remove it, or choose "
                "another --output"
            )


def _differences(job: Job) -> list[str]:
    """ "field is X there and Y here", of a folder that holds a run of this version."""
    try:
        there = Config.model_validate(read_history(job.folder).config)
        here = load(job.recipe, job.overrides)
    except ValueError:  # not begun, of another version, or a setting that the run itself will refuse
        return []
    ours, theirs = (dict(_flat(config.model_dump(mode="json"))) for config in (here, there))
    return [
        f"{field} is {theirs.get(field)!r} there and {ours.get(field)!r} here"
        for field in dict.fromkeys([*ours, *theirs])
        if ours.get(field) != theirs.get(field) and field not in ("run.output_dir", "run.name", "observe.progress")
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

"""An ablation: a YAML file with a recipe, the fields that vary, and seeds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt, ValidationError, model_validator

from megatron_gcpo.config.problems import explain, load_record
from megatron_gcpo.config.records import Record


class Trend(Record):
    """A metric as a straight line over one varied field."""

    field: str
    """A key of ``grid`` (or of ``sizes``) whose values are numbers."""
    log: bool = True
    """Over the logarithm to base 2 of the field: the slope is the change per doubling."""


class AblationConfig(Record):
    """Field names are YAML keys; unknown keys fail."""

    name: str
    recipe: str
    warm_start: str | None = None
    """A recipe that is run first, once, from which the cells start (their model.start_from)."""
    warm_start_for: str | None = None
    """A key of ``grid`` whose values need a warm start each, e.g. model."""
    grid: dict[str, tuple[Any, ...]] = Field(min_length=1)
    """What varies. A key with a dot is a field (rollout.group_size); any other is a folder of pieces (method: [gcpo, grpo],
    model: [...])."""
    sizes: dict[str, float] = Field(default_factory=dict)
    """For a trend over pieces: the number that stands for each value of the trend's field, e.g. parameters of a model."""
    seeds: tuple[int, ...] = (0, 1, 2)
    set: tuple[str, ...] = ()
    """Overrides of every run of the grid."""
    warm_start_set: tuple[str, ...] = ()
    """Overrides of the warm starts."""
    metrics: tuple[str, ...] = ("pass@1", "pass@8", "distinct@8", "effective_strategies", "vendi", "mean_tokens")
    """Of the last evaluation."""
    baseline: dict[str, Any] = Field(default_factory=dict)
    """Values of some grid keys: every other cell is compared, seed by seed, with the cell that has these and shares the
    rest."""
    trend: Trend | None = None
    at_once: PositiveInt = 1
    """Runs side by side on this machine."""

    @model_validator(mode="after")
    def _names_are_known(self) -> AblationConfig:
        for field, values in self.grid.items():
            if len({*map(str, values)}) < len(values) or not values:
                raise ValueError(f"grid.{field} must list different values")
        if twice := [item for item in self.set if _overridden(item) in self.grid]:
            raise ValueError(
                f"set {twice[0]} would undo what grid.{_overridden(twice[0])} varies: leave one of them out"
            )
        if not self.seeds or len({*self.seeds}) < len(self.seeds):
            raise ValueError("seeds must list different seeds")
        if self.warm_start_for is not None and (self.warm_start is None or self.warm_start_for not in self.grid):
            raise ValueError("warm_start_for must be a key of grid, beside a warm_start")
        for field, value in self.baseline.items():
            if value not in self.grid.get(field, ()):
                raise ValueError(f"baseline.{field} is {value!r}, which is none of grid.{field}")
        if self.trend is not None:
            values = self.grid.get(self.trend.field, ())
            wrong = [v for v in values if self.size_of(v) is None or (self.trend.log and (self.size_of(v) or 0) <= 0)]
            if not values or wrong:
                raise ValueError(
                    f"trend.field {self.trend.field!r} needs numbers in grid (or in sizes), got {wrong or 'none'}"
                )
        return self

    def size_of(self, value: Any) -> float | None:
        """The number that stands for a value of the trend's field."""
        if str(value) in self.sizes:
            return self.sizes[str(value)]
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of the grid."""

    values: dict[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """A folder name: the values that vary."""
        parts = [f"{field.split('.')[-1]}={value}" for field, value in self.values.items()]
        return re.sub(r"[^\w=.,+-]+", "_", ",".join(parts))

    def folder(self, root: Path) -> Path:
        return root / self.name / f"seed{self.seed}"

    def overrides(self, ablation: AblationConfig, root: Path) -> list[str]:
        """What makes the ablation's recipe this run."""
        folder = self.folder(root)
        settings = [override(field, value) for field, value in self.values.items()]
        if ablation.warm_start_for is not None:
            start = warm_start_folder(root, self.values[ablation.warm_start_for])
            settings.append(f"model.start_from={start}")
        where = [f"run.seed={self.seed}", f"run.output_dir={folder}", f"run.name={self.name}", "observe.progress=false"]
        return [*settings, *ablation.set, *where]


def override(field: str, value: Any) -> str:
    """How a value of the grid is said to the trainer: a field with a dot, else a piece."""
    return f"{field}={value}" if "." in field else f"{field}/{value}"


def _overridden(item: str) -> str:
    """The grid's key that an override would set."""
    return item.split("=")[0] if "=" in item else item.split("/")[0]


def warm_start_folder(root: Path, value: Any) -> Path:
    """Where the warm start for one value lives."""
    return root / "warm_start" / re.sub(r"[^\w=.,+-]+", "_", str(value))


def cells(ablation: AblationConfig) -> list[Cell]:
    """All runs, seeds outermost: an interrupted ablation has whole comparisons for its first seeds."""
    combinations = [dict(zip(ablation.grid, pick, strict=True)) for pick in itertools.product(*ablation.grid.values())]
    return [Cell(values=values, seed=seed) for seed in ablation.seeds for values in combinations]


def load_ablation(
    path: str | Path,
    *,
    seeds: Sequence[int] = (),
    set: Sequence[str] = (),
    warm_start_set: Sequence[str] = (),
) -> AblationConfig:
    """The ablation in a file, with other ``seeds`` if any are given and further overrides.

    Raises:
        ValueError: one line for each field that is wrong.
    """
    ablation = load_record(path, AblationConfig, "ablation", "a recipe and a grid")
    changes = {
        "seeds": seeds or ablation.seeds,
        "set": (*ablation.set, *set),
        "warm_start_set": (*ablation.warm_start_set, *warm_start_set),
    }
    try:
        return AblationConfig.model_validate({**ablation.model_dump(), **changes})
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {explain(AblationConfig, e)}" for e in error.errors())) from None

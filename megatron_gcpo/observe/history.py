"""A run folder read back as far as it goes: what is torn, from another version or missing is named, never fatal."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from megatron_gcpo.observe.rollouts import SCHEMA
from megatron_gcpo.observe.summary import FILE, Summary, read_summary


@dataclass(frozen=True, kw_only=True)
class RolloutFile:
    """The rollouts of one step on one replica."""

    path: Path
    step: int
    replica: int


@dataclass(frozen=True, kw_only=True)
class History:
    """What a run left behind."""

    folder: Path
    config: Mapping[str, Any]
    """Of ``config.yaml``; empty when there is none that can be read."""
    metrics: tuple[Mapping[str, Any], ...]
    """Rows of ``metrics.jsonl`` with a step, in the order of the file. Values are numbers or None."""
    summary: Summary | None
    """Only finished runs have one."""
    rollout_files: tuple[RolloutFile, ...]
    """Sorted by step and replica."""
    modified: float
    """When a metric, a rollout or the summary was last written, seconds since the epoch; 0: never."""
    skipped: tuple[str, ...]
    """One line for each thing that was passed over, and why."""

    @property
    def name(self) -> str:
        return str(_section(self.config, "run").get("name") or self.folder.name)

    @property
    def step(self) -> int:
        """Steps done, as far as the metrics say."""
        done = self.summary.step if self.summary else 0
        return max([done, *(int(row["step"]) for row in self.metrics)])

    @property
    def steps(self) -> int | None:
        """Steps wanted; None when the configuration is unknown."""
        wanted = _section(self.config, "run").get("steps")
        return wanted if isinstance(wanted, int) else None

    @property
    def method(self) -> str:
        return str(_section(self.config, "method").get("name", "?"))

    @property
    def finished(self) -> bool:
        return self.summary is not None and (self.steps is None or self.summary.step >= self.steps)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of one metric where it was a finite number; later rows of a step replace earlier ones."""
        by_step = {int(row["step"]): row[name] for row in self.metrics if _is_number(row.get(name))}
        steps = sorted(by_step)
        return steps, [float(by_step[step]) for step in steps]

    def metric_names(self) -> list[str]:
        return sorted({name for row in self.metrics for name in row} - {"step", "time"})


def read_history(folder: Path) -> History:
    """Everything in a run folder but the rollouts themselves, which ``read_rollouts`` opens.

    Raises:
        ValueError: the folder does not exist, or holds nothing that a run writes.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no run folder {folder}: give the run.output_dir of a run")
    skipped: list[str] = []
    config = _config(folder / "config.yaml", skipped)
    metrics = _metrics(folder / "metrics.jsonl", skipped)
    summary = None
    try:
        summary = read_summary(folder)
    except ValueError as error:
        skipped.append(f"{FILE}: {str(error).rsplit(':', 1)[0]}")
    files = _rollout_files(folder / "rollouts", skipped)
    if not (config or metrics or summary or files):
        why = f" ({skipped[0]})" if skipped else ""
        raise ValueError(f"{folder} holds nothing of a run{why}: give the run.output_dir of a run that has begun")
    written = [folder / "metrics.jsonl", folder / FILE, *(file.path for file in files[-1:])]
    return History(
        folder=folder,
        config=config,
        metrics=tuple(metrics),
        summary=summary,
        rollout_files=tuple(files),
        modified=max((path.stat().st_mtime for path in written if path.is_file()), default=0.0),
        skipped=tuple(skipped),
    )


GROUPED = ("step", "prompt_id", "sample")
"""Without these a rollout belongs to no group."""


def read_rollouts(
    files: Iterable[RolloutFile],
    columns: Iterable[str] | None = None,
    keep: Callable[[pa.Table], pa.Table] | None = None,
    needed: Iterable[str] = GROUPED,
) -> tuple[pa.Table, tuple[str, ...]]:
    """The rollouts of some files as one table in today's schema, and what was skipped.

    A file that cannot be read is left out; a column that an older version did not write is null, one that today's
    version does not know is left out. Both are named.

    keep: which rows of one file's table are held, where all files together would be too many.
    needed: columns that a group must have for all of its rollouts; groups without are left out, and counted.
    """
    wanted = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    tables: list[pa.Table] = []
    skipped: dict[str, str] = {}
    cut: list[tuple[str, list[str]]] = []
    unreadable: dict[str, list[str]] = {}
    for file in files:
        try:
            with pq.ParquetFile(file.path) as parquet:
                there = set(parquet.schema_arrow.names)
                table = parquet.read(columns=[name for name in wanted.names if name in there])
                table, lacking = _whole_groups(_in_schema(table, wanted), [n for n in needed if n in wanted.names])
                if lacking:
                    cut.append((file.path.name, lacking))
                tables.append(table if keep is None else keep(table))
        except (OSError, pa.ArrowException, ValueError) as error:
            unreadable.setdefault(str(error).splitlines()[0], []).append(file.path.name)
            continue
        for kind, names in (
            ("lacks", [name for name in wanted.names if name not in there]),
            ("has the unknown", sorted(there - set(SCHEMA.names))),
        ):
            if names:
                skipped.setdefault(f"{kind} {names}", f"{file.path.name} {kind} column {', '.join(names)}")
    for reason, names in unreadable.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        skipped[reason] = f"{names[0]}{more}: not readable ({reason})"
    if cut:
        names = ", ".join(dict.fromkeys(name for _, lacking in cut for name in lacking))
        skipped["groups"] = f"groups without {names} in {len(cut)} files, e.g. {cut[0][0]}: left out"
    return (pa.concat_tables(tables) if tables else wanted.empty_table()), tuple(skipped.values())


def group_bounds(rollouts: pa.Table) -> list[tuple[int, int]]:
    """First row and end of each group; a group begins where ``sample`` is 0."""
    starts = np.flatnonzero(rollouts["sample"].to_numpy() == 0).tolist()
    return list(itertools.pairwise([*starts, len(rollouts)]))


def _whole_groups(table: pa.Table, needed: Sequence[str]) -> tuple[pa.Table, list[str]]:
    """The groups that have every needed column throughout, and which columns the others lack."""
    lacking = [name for name in needed if table[name].null_count]
    if not lacking:
        return table, []
    row_is_torn = np.zeros(len(table), dtype=bool)
    for name in lacking:
        row_is_torn |= table[name].is_null().to_numpy()
    group_of_row = np.cumsum(table["sample"].fill_null(-1).to_numpy() == 0)
    torn = np.unique(group_of_row[row_is_torn])
    return table.filter(pa.array(~np.isin(group_of_row, torn))), lacking


def _in_schema(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    return pa.table(
        {
            field.name: table[field.name].cast(field.type)
            if field.name in table.column_names
            else pa.nulls(len(table), field.type)
            for field in wanted
        },
        schema=wanted,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _config(path: Path, skipped: list[str]) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        skipped.append(f"{path.name}: missing")
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        skipped.append(f"{path.name}: not readable ({str(error).splitlines()[0]})")
        return {}
    if not isinstance(values, dict):
        skipped.append(f"{path.name}: holds no configuration")
        return {}
    return values


def _metrics(path: Path, skipped: list[str]) -> list[Mapping[str, Any]]:
    if not path.is_file():
        skipped.append(f"{path.name}: missing")
        return []
    rows, torn, odd = [], 0, 0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        skipped.append(f"{path.name}: not readable ({error.strerror})")
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            torn += 1
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and _is_number(row["step"]):
            rows.append(row)
        else:
            odd += 1
    if torn:
        skipped.append(f"{path.name}: {torn} line{'s' if torn > 1 else ''} cut off or not JSON")
    if odd:
        skipped.append(f"{path.name}: {odd} line{'s' if odd > 1 else ''} without a step")
    return rows


def _rollout_files(folder: Path, skipped: list[str]) -> list[RolloutFile]:
    files = []
    for path in folder.glob("*.parquet"):
        parts = path.stem.split("_")  # step_000012_replica_003
        if len(parts) == 4 and parts[1].isdigit() and parts[3].isdigit():
            files.append(RolloutFile(path=path, step=int(parts[1]), replica=int(parts[3])))
        else:
            skipped.append(f"rollouts/{path.name}: not named like a step's rollouts")
    return sorted(files, key=lambda file: (file.step, file.replica))

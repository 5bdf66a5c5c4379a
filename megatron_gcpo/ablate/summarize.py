"""What the finished cells say: means over seeds, paired differences from the baseline, a trend, as a table and Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from megatron_gcpo.ablate.execute import Failure, is_finished
from megatron_gcpo.ablate.grid import AblationConfig, Cell, cells
from megatron_gcpo.evaluate.intervals import Interval, mean_interval, paired_interval
from megatron_gcpo.observe.history import read_history


@dataclass(frozen=True, kw_only=True)
class Row:
    """One combination of values, over its finished seeds."""

    values: Mapping[str, Any]
    by_seed: Mapping[int, Mapping[str, float]]
    """seed -> metric -> value of the last evaluation."""
    means: Mapping[str, Interval]
    differences: Mapping[str, Interval]
    """From the baseline, seed by seed; empty for the baseline itself and where fewer than two seeds are shared."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A metric over the trend's field, for one combination of the other values."""

    values: Mapping[str, Any]
    metric: str
    slope: Interval
    """Per doubling where the trend is logarithmic, else per unit; interval by resampling seeds."""
    intercept: float


def summarize(ablation: AblationConfig, root: Path) -> list[Row]:
    """A row per combination that has at least one finished seed, in the order of the grid."""
    found: dict[str, tuple[Mapping[str, Any], dict[int, Mapping[str, float]]]] = {}
    for cell in cells(ablation):
        _, seeds = found.setdefault(cell.name, (cell.values, {}))
        if is_finished(cell.folder(root)):
            summary = read_history(cell.folder(root)).summary
            if summary is not None and summary.after is not None:
                seeds[cell.seed] = {m: summary.after[m] for m in ablation.metrics if m in summary.after}
    rows = []
    for values, seeds in found.values():
        if seeds:
            base = _baseline(ablation, values, found)
            rows.append(
                Row(values=values, by_seed=seeds, means=_means(ablation, seeds), differences=_differences(seeds, base))
            )
    return rows


def _means(ablation: AblationConfig, seeds: Mapping[int, Mapping[str, float]]) -> dict[str, Interval]:
    columns = {m: [row[m] for row in seeds.values() if m in row] for m in ablation.metrics}
    return {metric: mean_interval(column) for metric, column in columns.items() if column}


def _baseline(ablation: AblationConfig, values: Mapping[str, Any], found: Mapping[str, Any]) -> Mapping[int, Any]:
    if not ablation.baseline or all(values[field] == v for field, v in ablation.baseline.items()):
        return {}
    return found[Cell(values={**values, **ablation.baseline}, seed=0).name][1]


def _differences(
    seeds: Mapping[int, Mapping[str, float]], base: Mapping[int, Mapping[str, float]]
) -> dict[str, Interval]:
    shared = sorted(set(seeds) & set(base))
    if len(shared) < 2:
        return {}
    metrics = [m for m in seeds[shared[0]] if all(m in side[s] for side in (seeds, base) for s in shared)]
    return {m: paired_interval([seeds[s][m] for s in shared], [base[s][m] for s in shared]) for m in metrics}


def fit_trends(ablation: AblationConfig, rows: Sequence[Row]) -> list[Line]:
    """Least squares over the trend's field for each metric and each combination of the other values.

    The fit is made for every seed by itself; the slope's interval is that of the mean of these slopes, so that seeds, which
    are what varies, carry the uncertainty. A seed takes part with two sizes or more.
    """
    if ablation.trend is None:
        return []
    field = ablation.trend.field
    groups: dict[str, list[Row]] = {}
    for row in rows:
        rest = {key: value for key, value in row.values.items() if key != field}
        groups.setdefault(json.dumps(rest, default=str), []).append(row)
    lines = []
    for members in groups.values():
        rest = {key: value for key, value in members[0].values.items() if key != field}
        for metric in ablation.metrics:
            fits = [fit for seed in ablation.seeds if (fit := _fit(ablation, members, metric, seed)) is not None]
            if fits:
                slopes, intercepts = zip(*fits, strict=True)
                lines.append(
                    Line(values=rest, metric=metric, slope=mean_interval(slopes), intercept=float(np.mean(intercepts)))
                )
    return lines


def _fit(ablation: AblationConfig, rows: Sequence[Row], metric: str, seed: int) -> tuple[float, float] | None:
    assert ablation.trend is not None
    points = []
    for row in rows:
        size = ablation.size_of(row.values[ablation.trend.field])
        assert size is not None, "got a value without a number, expected the configuration to refuse it"
        if metric in row.by_seed.get(seed, {}):
            points.append((math.log2(size) if ablation.trend.log else size, row.by_seed[seed][metric]))
    if len({x for x, _ in points}) < 2:
        return None
    x, y = np.array(points).T
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


def table(ablation: AblationConfig, rows: Sequence[Row]) -> Table:
    """A row per combination; under each mean the paired difference from the baseline, where there is one."""
    shown = Table(title=f"{ablation.name}: mean [95 % interval] over seeds", title_justify="left", show_lines=True)
    for field in ablation.grid:
        shown.add_column(field)
    shown.add_column("seeds", justify="right")
    for metric in ablation.metrics:
        shown.add_column(metric, justify="right")
    for row in rows:
        shown.add_row(
            *map(str, row.values.values()), str(len(row.by_seed)), *(_cell(row, m, "\n") for m in ablation.metrics)
        )
    return shown


def markdown(ablation: AblationConfig, rows: Sequence[Row], lines: Sequence[Line], failures: Sequence[Failure]) -> str:
    """The same for a page, with the trends and what failed."""
    head = [*ablation.grid, "seeds", *ablation.metrics]
    text = [f"# {ablation.name}", "", "Means and 95 % bootstrap intervals over seeds."]
    if ablation.baseline:
        base = ", ".join(f"{field} {value}" for field, value in ablation.baseline.items())
        text.append(f"In parentheses: paired difference from {base}, seed by seed.")
    text += ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells_of = [
            *map(str, row.values.values()),
            str(len(row.by_seed)),
            *(_cell(row, m, " ") for m in ablation.metrics),
        ]
        text.append("| " + " | ".join(cells_of) + " |")
    if lines:
        assert ablation.trend is not None
        per = "doubling" if ablation.trend.log else "unit"
        text += ["", f"## Trend over {ablation.trend.field}", "", f"Slope per {per}, fitted seed by seed.", ""]
        for line in lines:
            where = ", ".join(f"{field} {value}" for field, value in line.values.items()) or "all"
            text.append(f"- {where}, {line.metric}: {line.slope}")
    if failures:
        text += ["", "## Not finished", ""]
        text += [f"- {f.cell.name}, seed {f.cell.seed}: {f.reason}" for f in failures]
    return "\n".join(text) + "\n"


def _cell(row: Row, metric: str, separator: str) -> str:
    if metric not in row.means:
        return "-"
    mean = row.means[metric]
    shown = str(mean) if math.isfinite(mean.low) else f"{mean.mean:.3f}"
    difference = row.differences.get(metric)
    if difference is None:
        return shown
    return f"{shown}{separator}({difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}])"

"""What the finished cells say: means over seeds, paired differences from the baseline, a trend, as a table and Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from megatron_gcpo.ablate.grid import AblationConfig, Cell, cells
from megatron_gcpo.ablate.jobs import Failure, is_finished
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
    """From the baseline, seed by seed; empty for the baseline itself and where no seed is shared."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A metric over the trend's field, for one combination of the other values."""

    values: Mapping[str, Any]
    metric: str
    slope: Interval
    """Per doubling where the trend is logarithmic, else per unit; interval by resampling seeds."""
    intercept: float
    difference: Interval | None
    """Of the slope from the baseline's, seed by seed; None for the baseline itself and without one."""

    @property
    def label(self) -> str:
        return label_of(self.values)


def label_of(values: Mapping[str, Any]) -> str:
    """A combination of values in words."""
    return ", ".join(f"{field.split('.')[-1]} {value}" for field, value in values.items()) or "all"


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
    if not shared:
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
        groups.setdefault(_key(row.values, field), []).append(row)
    lines = []
    for members in groups.values():
        values = {key: value for key, value in members[0].values.items() if key != field}
        base = groups.get(_key({**values, **ablation.baseline}, field), [])
        for metric in ablation.metrics:
            fits = _fits(ablation, members, metric)
            if not fits:
                continue
            slopes, intercepts = zip(*fits.values(), strict=True)
            theirs = _fits(ablation, base, metric) if field not in ablation.baseline and base is not members else {}
            shared = [seed for seed in fits if seed in theirs]
            lines.append(
                Line(
                    values=values,
                    metric=metric,
                    slope=mean_interval(slopes),
                    intercept=float(np.mean(intercepts)),
                    difference=paired_interval([fits[s][0] for s in shared], [theirs[s][0] for s in shared])
                    if shared
                    else None,
                )
            )
    return lines


def _key(values: Mapping[str, Any], without: str) -> str:
    return json.dumps({key: value for key, value in values.items() if key != without}, default=str)


def _fits(ablation: AblationConfig, rows: Sequence[Row], metric: str) -> dict[int, tuple[float, float]]:
    """seed -> slope and intercept."""
    fits = {seed: _fit(ablation, rows, metric, seed) for seed in ablation.seeds}
    return {seed: fit for seed, fit in fits.items() if fit is not None}


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
    """A block per metric: a row per combination, with its mean and its paired difference from the baseline."""
    head = ("", *ablation.grid, "seeds", "mean [95 % interval]", *_from_baseline(ablation))
    shown = Table(title=f"{ablation.name}: over seeds", title_justify="left", box=box.SIMPLE_HEAD)
    for column in head:
        shown.add_column(column, justify="right" if column == "seeds" else "left")
    for metric in ablation.metrics:
        block = [(row, _cells(row, metric)) for row in rows]
        for n, (row, cells_of) in enumerate(block):
            differs = cells_of[-1:] if ablation.baseline else []
            values = [*map(str, row.values.values()), str(len(row.by_seed)), cells_of[0], *differs]
            shown.add_row(metric if n == 0 else "", *values, end_section=n == len(block) - 1)
    return shown


def markdown(ablation: AblationConfig, rows: Sequence[Row], lines: Sequence[Line], failures: Sequence[Failure]) -> str:
    """The same for a page, with the trends and what failed."""
    text = [f"# {ablation.name}", "", "Means over seeds, with 95 % bootstrap intervals where there are two or more."]
    if ablation.baseline:
        text.append("Differences are paired: seed by seed.")
    head = [*ablation.grid, "seeds", "mean", *_from_baseline(ablation)]
    for metric in ablation.metrics:
        text += ["", f"## {metric}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in rows:
            mean, difference = _cells(row, metric)
            values = [*map(str, row.values.values()), str(len(row.by_seed)), mean]
            text.append("| " + " | ".join([*values, *([difference] if ablation.baseline else [])]) + " |")
    if lines:
        assert ablation.trend is not None
        per = "doubling" if ablation.trend.log else "unit"
        text += ["", f"## Trend over {ablation.trend.field}", "", f"Slope per {per}, fitted seed by seed."]
        text += ["In parentheses: its difference from the baseline's."] if ablation.baseline else []
        text += ["", *(f"- {line.label}, {line.metric}: {_slope(line)}" for line in lines)]
    if failures:
        text += ["", "## Not finished", ""]
        text += [f"- {failure.job.name}: {failure.reason}" for failure in failures]
    return "\n".join(text) + "\n"


def _from_baseline(ablation: AblationConfig) -> list[str]:
    """The heading of the differences, where there are any."""
    return [f"difference from {label_of(ablation.baseline)}"] if ablation.baseline else []


def _cells(row: Row, metric: str) -> tuple[str, str]:
    """Mean and difference."""
    mean, difference = row.means.get(metric), row.differences.get(metric)
    return "-" if mean is None else str(mean), "" if difference is None else difference.signed()


def trend_table(ablation: AblationConfig, lines: Sequence[Line]) -> Table:
    """A row per metric, a column per combination of the values that the trend is not over."""
    assert ablation.trend is not None, "got no trend, expected one where lines were fitted"
    per = "doubling" if ablation.trend.log else "unit"
    title = f"slope per {per} of {ablation.trend.field} [95 % interval]"
    title += " (its difference from the baseline's)" if ablation.baseline else ""
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    labels = list(dict.fromkeys(line.label for line in lines))
    for column in ("", *labels):
        shown.add_column(column, justify="right" if column else "left")
    for metric in dict.fromkeys(line.metric for line in lines):
        found = {line.label: _slope(line, "\n") for line in lines if line.metric == metric}
        shown.add_row(metric, *(found.get(label, "-") for label in labels))
    return shown


def _slope(line: Line, separator: str = " ") -> str:
    return line.slope.signed() + ("" if line.difference is None else f"{separator}({line.difference.signed()})")

"""One picture per metric: the varied field across, a line for each combination of the other values, bands over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megatron_gcpo.ablate.grid import AblationConfig, Trend
from megatron_gcpo.ablate.summarize import Line, Row, label_of


def draw(ablation: AblationConfig, rows: Sequence[Row], trends: Sequence[Line], folder: Path) -> list[Path]:
    """PNG files of all metrics that were measured, by name, with the fitted trends."""
    across = ablation.trend.field if ablation.trend else max(ablation.grid, key=lambda field: len(ablation.grid[field]))
    files = []
    for metric in ablation.metrics:
        measured = [row for row in rows if metric in row.means]
        if measured:
            path = folder / f"{metric.replace('@', '_at_')}.png"
            fitted = [line for line in trends if line.metric == metric]
            _figure(ablation, measured, fitted, metric, across).savefig(path, dpi=120)
            files.append(path)
    return files


def _figure(ablation: AblationConfig, rows: Sequence[Row], trends: Sequence[Line], metric: str, across: str) -> Figure:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    trend, values = ablation.trend, ablation.grid[across]
    # values without a trend stand side by side: their distances mean nothing
    at = {str(v): (ablation.size_of(v) or 0.0) if trend else float(i) for i, v in enumerate(values)}
    joined = trend is not None or all(ablation.size_of(value) is not None for value in values)
    lines: dict[str, list[Row]] = {}
    for row in rows:
        rest = {field: value for field, value in row.values.items() if field != across}
        lines.setdefault(label_of(rest), []).append(row)
    fitted = {line.label: line for line in trends}
    for n, (label, members) in enumerate(lines.items()):
        aside = 0.0 if trend else 0.06 * (n - (len(lines) - 1) / 2)
        places = {value: place + aside for value, place in at.items()}
        color = _line(axes, members, metric, [places[str(row.values[across])] for row in members], label, joined)
        if trend is not None and label in fitted:
            _fit(axes, fitted[label], at, trend, color)
    if trend is not None and trend.log:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    axes.set_xticks(list(at.values()), list(at))
    axes.margins(x=0.1)
    axes.set_xlabel(across)
    axes.set_ylabel(metric)
    axes.grid(alpha=0.3)
    if len(lines) > 1 or fitted:
        axes.legend(fontsize="small")
    return figure


def _line(axes: Any, rows: Sequence[Row], metric: str, places: Sequence[float], label: str, joined: bool) -> str:
    """Every seed, their mean and its interval where it is known; returns the color."""
    points = sorted(zip(places, rows, strict=True), key=lambda point: point[0])
    x = [place for place, _ in points]
    means = [row.means[metric] for _, row in points]
    reach = [[i.mean - i.low if math.isfinite(i.low) else 0.0 for i in means]]
    reach.append([i.high - i.mean if math.isfinite(i.high) else 0.0 for i in means])
    drawn = axes.errorbar(x, [i.mean for i in means], reach, fmt="o-" if joined else "o", capsize=4, label=label)
    color = drawn.lines[0].get_color()
    seeds = [(place, found[metric]) for place, row in points for found in row.by_seed.values() if metric in found]
    axes.plot(*zip(*seeds, strict=True), linestyle="none", marker=".", markersize=4, alpha=0.5, color=color)
    return color


def _fit(axes: Any, line: Line, at: Mapping[str, float], trend: Trend, color: str) -> None:
    ends = [min(at.values()), max(at.values())]
    heights = [line.intercept + line.slope.mean * (math.log2(end) if trend.log else end) for end in ends]
    per = "doubling" if trend.log else "unit"
    axes.plot(ends, heights, linestyle="--", linewidth=1, color=color, label=f"{line.slope.signed()} per {per}")

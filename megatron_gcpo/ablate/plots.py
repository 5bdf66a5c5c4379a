"""One picture per metric: the varied field across, a line for each combination of the other values, bands over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megatron_gcpo.ablate.grid import AblationConfig
from megatron_gcpo.ablate.summarize import Row


def draw(ablation: AblationConfig, rows: Sequence[Row], folder: Path) -> list[Path]:
    """PNG files of all metrics that were measured, by name."""
    across = ablation.trend.field if ablation.trend else max(ablation.grid, key=lambda field: len(ablation.grid[field]))
    files = []
    for metric in ablation.metrics:
        measured = [row for row in rows if metric in row.means]
        if measured:
            path = folder / f"{metric.replace('@', '_at_')}.png"
            _figure(ablation, measured, metric, across).savefig(path, dpi=120)
            files.append(path)
    return files


def _figure(ablation: AblationConfig, rows: Sequence[Row], metric: str, across: str) -> Figure:
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    values = list(ablation.grid[across])
    places = [ablation.size_of(value) for value in values]
    numeric = all(place is not None for place in places)
    at: dict[str, float] = {
        str(v): (p if numeric and p is not None else i) for i, (v, p) in enumerate(zip(values, places, strict=True))
    }
    lines: dict[str, list[Row]] = {}
    for row in rows:
        rest = ", ".join(f"{field.split('.')[-1]} {value}" for field, value in row.values.items() if field != across)
        lines.setdefault(rest, []).append(row)
    for label, members in lines.items():
        _line(axes, members, metric, across, at, label)
    if numeric and ablation.trend is not None and ablation.trend.log:
        axes.set_xscale("log", base=2)
    axes.set_xticks(list(at.values()), list(at))
    axes.set_xlabel(across)
    axes.set_ylabel(metric)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(fontsize="small")
    return figure


def _line(axes: Any, rows: Sequence[Row], metric: str, across: str, at: dict[str, float], label: str) -> None:
    points = sorted((at[str(row.values[across])], row.means[metric]) for row in rows)
    x = [place for place, _ in points]
    means = [interval.mean for _, interval in points]
    (drawn,) = axes.plot(x, means, marker="o", label=label or None)
    if all(math.isfinite(interval.low) for _, interval in points):
        axes.fill_between(
            x, [i.low for _, i in points], [i.high for _, i in points], alpha=0.2, color=drawn.get_color()
        )

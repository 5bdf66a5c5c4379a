"""Weighted means that can be merged over replicas: numbers only, never text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np


class Tally:
    """name -> (weighted sum, weight). Means of merged tallies equal the mean over everything that was added."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, values: float | Iterable[float]) -> None:
        """Add one value, or many that count equally."""
        array = np.asarray([values] if isinstance(values, (int, float)) else list(values), dtype=np.float64)
        total, weight = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (total + float(array.sum()), weight + array.size)

    def add_all(self, metrics: Mapping[str, float], prefix: str = "") -> None:
        for name, value in metrics.items():
            self.add(prefix + name, float(value))

    def merge(self, others: Iterable[Tally]) -> Tally:
        """A tally of these and others."""
        merged = Tally()
        for tally in (self, *others):
            for name, (total, weight) in tally._sums.items():
                have, count = merged._sums.get(name, (0.0, 0.0))
                merged._sums[name] = (have + total, count + weight)
        return merged

    def means(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self._sums.items() if weight}

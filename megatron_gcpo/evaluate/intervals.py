"""How sure a mean is: bootstrap intervals over prompts, or over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and the range it is in, in the unit of the values."""

    mean: float
    low: float
    high: float
    level: float
    """Share of such intervals that hold the true mean, e.g. 0.95."""

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(values: Sequence[float] | np.ndarray, *, level: float = 0.95, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean of independent values, one for each prompt or seed (Efron 1979).

    A single value has no spread to resample: its interval is infinite. Of few values (seeds) a percentile interval is
    too narrow, by sqrt((n - 1) / n) in the standard error (derived: the variance of a resample is that of n, not n - 1);
    it is widened by the inverse factor.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or len(data) == 0 or not np.isfinite(data).all():
        raise ValueError(f"an interval needs finite values, one for each prompt or seed; got {data.tolist()}")
    mean = float(data.mean())
    if len(data) == 1:
        return Interval(mean=mean, low=-np.inf, high=np.inf, level=level)
    # Resampling in blocks keeps the memory of many prompts bounded.
    rng = np.random.default_rng(seed)
    block = max(1, 10_000_000 // len(data))
    means = np.concatenate(
        [
            data[rng.integers(len(data), size=(min(block, RESAMPLES - start), len(data)))].mean(axis=1)
            for start in range(0, RESAMPLES, block)
        ]
    )
    widen = np.sqrt(len(data) / (len(data) - 1))
    low, high = mean + widen * (np.quantile(means, [(1 - level) / 2, (1 + level) / 2]) - mean)
    return Interval(mean=mean, low=float(low), high=float(high), level=level)


def paired_interval(
    ours: Sequence[float] | np.ndarray, theirs: Sequence[float] | np.ndarray, *, level: float = 0.95, seed: int = 0
) -> Interval:
    """The same of the differences ours - theirs, value by value: the same prompts, or the same seeds, on both sides.

    Raises:
        ValueError: the two sides differ in length, or as for ``mean_interval``.
    """
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"pairs need the same prompts or seeds on both sides, got {len(a)} and {len(b)} values")
    return mean_interval(a - b, level=level, seed=seed)

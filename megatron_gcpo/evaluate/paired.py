"""The difference of two methods over seeds that both have seen, with an interval that says how far seeds alone move it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

EXACT_UP_TO = 6
"""Seeds whose n^n resamples are all enumerated."""
RESAMPLES = 20_000


@dataclass(frozen=True, kw_only=True)
class Difference:
    mean: float
    low: float
    """Ends of the percentile interval; equal to the mean for one seed, which says nothing of the spread."""
    high: float


def paired_difference(ours: Sequence[float], theirs: Sequence[float], level: float = 0.95) -> Difference:
    """Mean of ours - theirs, seed by seed, and its bootstrap interval: seeds are resampled, pairs are kept together.

    Both have one value for each seed, in the same order. With few seeds the interval is short of its level (three differences
    have ten distinct means): it describes these seeds and is no test. Every resample is enumerated up to 6 seeds, beyond
    that 20,000 are drawn with a fixed seed.
    """
    assert len(ours) == len(theirs) > 0, f"got {len(ours)} and {len(theirs)} values, expected one for each seed in both"
    differences = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    size = len(differences)
    if size <= EXACT_UP_TO:
        picks = np.array(list(itertools.product(range(size), repeat=size)))
    else:
        picks = np.random.default_rng(0).integers(0, size, (RESAMPLES, size))
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(differences[picks].mean(1), [tail, 100 - tail])
    return Difference(mean=float(differences.mean()), low=float(low), high=float(high))

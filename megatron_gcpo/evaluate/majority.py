"""maj@k: how often the most frequent answer of k samples is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from megatron_gcpo.evaluate.passk import miss_probability

RIGHT = object()
"""All correct samples vote for one answer, however they write it."""
DRAWS = 1000


def majority_at_k(answers_n: Sequence[Hashable | None], correct_n: Sequence[bool], k: int, *, seed: int = 0) -> float:
    """The chance that the plurality of k of these n samples, drawn without replacement, is the right answer.

    Wrong samples vote for their own answer; ``None`` (no answer found) does not vote. Ties are broken evenly. Exact for
    k = 1 and k = n, else the mean of ``DRAWS`` seeded draws (standard error at most 0.016).

    Raises:
        ValueError: k is not in [1, n].
    """
    n = len(correct_n)
    assert len(answers_n) == n, f"got {len(answers_n)} answers, expected {n}"
    miss_probability(n, 0, k)  # refuses an impossible k
    votes: list[Hashable | None] = [
        RIGHT if right else answer for answer, right in zip(answers_n, correct_n, strict=True)
    ]
    if k == 1:
        return sum(correct_n) / n
    if k == n:
        return _chance_of_right(votes)
    rng = np.random.default_rng(seed)
    draws = rng.random((DRAWS, n)).argsort(axis=1)[:, :k]
    return float(np.mean([_chance_of_right([votes[i] for i in draw]) for draw in draws]))


def _chance_of_right(votes: Sequence[Hashable | None]) -> float:
    counts = Counter(vote for vote in votes if vote is not None)
    most = max(counts.values(), default=0)
    winners = [vote for vote, count in counts.items() if count == most]
    return 1 / len(winners) if RIGHT in winners else 0.0

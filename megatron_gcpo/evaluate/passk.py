"""pass@k without bias: the chance that k samples drawn without replacement from n hold at least one correct."""

from __future__ import annotations


def miss_probability(n: int, hits: int, k: int) -> float:
    """C(n - hits, k) / C(n, k): the chance that k of n samples miss all ``hits`` of them, as a product that is exact
    for any n (binomials overflow)."""
    assert 0 <= hits <= n, f"got {hits} of {n} samples, expected between 0 and all"
    if not 1 <= k <= n:
        raise ValueError(
            f"k = {k} does not fit {n} samples per prompt: raise evaluate.samples or take {k} out of evaluate.ks"
        )
    miss = 1.0
    for i in range(hits):
        miss *= max(0, n - k - i) / (n - i)
    return miss


def pass_at_k(n: int, correct: int, k: int) -> float:
    """1 - C(n - correct, k) / C(n, k), the unbiased estimator of pass@k from n samples (arXiv 2107.03374, section 2.1).

    Raises:
        ValueError: k is not in [1, n].
    """
    return 1.0 - miss_probability(n, correct, k)

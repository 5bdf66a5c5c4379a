"""How many different things a set of samples holds: counted by label, or by the geometry of embeddings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import torch

from megatron_gcpo.evaluate.passk import miss_probability


def distinct_at_k(labels: Sequence[Hashable | None], k: int) -> float:
    """Expected number of distinct labels among k of these n samples, drawn without replacement.

    ``None`` stands for a sample that brings no label (wrong, or not recognised). The sum over labels of the chance to
    be drawn at all, 1 - C(n - n_label, k) / C(n, k) (derived); with k = n the plain number of distinct labels.

    Raises:
        ValueError: k is not in [1, n].
    """
    counts = Counter(label for label in labels if label is not None)
    miss_probability(len(labels), 0, k)  # refuses an impossible k even where no sample is labelled
    return sum(1.0 - miss_probability(len(labels), count, k) for count in counts.values())


def effective_number(labels: Iterable[Hashable]) -> float:
    """exp(entropy) of the frequencies of the labels, ``None`` counting as one more label; 0 for no labels.

    The Hill number of order 1: n equally frequent labels give n, whatever the number of samples.
    """
    counts = Counter(labels).values()
    total = sum(counts)
    return math.exp(-sum(c / total * math.log(c / total) for c in counts)) if total else 0.0


def vendi_score(embeddings_KD: torch.Tensor) -> float:
    """exp(entropy) of the eigenvalues of E E^T / K for unit rows E (arXiv 2210.02410); 0 for no rows.

    1 for K copies of one direction, K for K orthogonal ones.
    """
    return _spectral_number(_singular_values(embeddings_KD).square())


def effective_rank(embeddings_KD: torch.Tensor) -> float:
    """exp(entropy) of the singular values of E divided by their sum (Roy and Vetterli, EUSIPCO 2007); 0 for no rows."""
    return _spectral_number(_singular_values(embeddings_KD))


def _singular_values(embeddings_KD: torch.Tensor) -> torch.Tensor:
    assert embeddings_KD.ndim == 2, f"got shape {tuple(embeddings_KD.shape)}, expected [K, D]"
    return torch.linalg.svdvals(embeddings_KD.double()) if len(embeddings_KD) else torch.zeros(0, dtype=torch.float64)


def _spectral_number(weights: torch.Tensor) -> float:
    if len(weights) == 0:
        return 0.0
    shares = weights / weights.sum()
    return float(torch.special.entr(shares).sum().exp())

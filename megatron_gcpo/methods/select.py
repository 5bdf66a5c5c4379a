"""Order statistics over all replicas, from sums alone."""

from __future__ import annotations

from collections.abc import Callable

import torch


def kth_largest(values_T: torch.Tensor, k: int, total: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The k-th largest of the float32 values of all replicas (k from 1; the least of all when there are fewer). Exact.

    Finite floats compare like the integers that their bits spell (with the order of negative ones turned round), so 32
    counts, one for each bit of the answer, find it. Collective: ``total`` sums a tensor over the replicas.
    """
    bits_T = values_T.float().view(torch.int32).long()
    keys_T = torch.where(bits_T < 0, -1 - (bits_T & 0x7FFFFFFF), bits_T) + 2**31
    key = 0
    for bit in range(31, -1, -1):
        candidate = key | 1 << bit
        (enough,) = total((keys_T >= candidate).sum(dtype=torch.float64)[None]).tolist()
        if enough >= k:
            key = candidate
    if key == 0:  # fewer than k values
        count = torch.tensor([len(values_T)], dtype=torch.float64)
        (known,) = total(count).tolist()
        return kth_largest(values_T, int(known), total) if 0 < known < k else float("-inf")
    signed = key - 2**31
    raw = signed if signed >= 0 else (-1 - signed) - 2**31
    return float(torch.tensor([raw], dtype=torch.int32).view(torch.float32))

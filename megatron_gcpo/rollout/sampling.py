"""Drawing one token per row such that a row's draw depends on its own seed and distribution only.

One uniform number per token, through the inverse of the cumulative distribution: the numbers of a row come from a
counter-based generator keyed by the row's seed, so neither the other rows of the batch nor the order in which rows
finish can change what a row draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from megatron_gcpo.rollout.engine import Sampling

BLOCK_TOKENS = 64


class UniformStreams:
    """Per row, the uniform numbers in [0, 1) of its tokens, in order."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._generators = [np.random.Generator(np.random.Philox(key=seed)) for seed in seeds]
        self._device = device
        self._start = 0
        self._block_NB = torch.empty(len(seeds), 0, dtype=torch.float64, device=device)

    def at(self, token: int, rows_R: torch.Tensor) -> torch.Tensor:
        """[R] float64: number ``token`` of these rows. Calls come with token = 0, 1, 2, ... in turn."""
        if token - self._start >= self._block_NB.shape[1]:
            self._start = token
            block = np.stack([generator.random(BLOCK_TOKENS) for generator in self._generators])
            self._block_NB = torch.from_numpy(block).to(self._device)
        return self._block_NB[rows_R, token - self._start]


def sampling_logprobs(logits_NV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[N, V] float32 log-probabilities of the distribution tokens are drawn from; -inf where it is cut off.

    Min-p leaves out tokens less likely than min_p times the likeliest. Top-p keeps the most likely tokens until their
    mass reaches top_p, the one that reaches it included.
    """
    scaled_NV = logits_NV.float()
    if sampling.temperature != 1.0:
        scaled_NV = scaled_NV / sampling.temperature
    if sampling.min_p > 0:
        least_N1 = scaled_NV.amax(-1, keepdim=True) + math.log(sampling.min_p)
        scaled_NV = scaled_NV.masked_fill(scaled_NV < least_N1, -torch.inf)
    if 0 < sampling.top_k < scaled_NV.shape[-1]:
        # by index and not by threshold: of equal logits exactly top_k survive
        top = scaled_NV.topk(sampling.top_k, dim=-1)
        scaled_NV = torch.full_like(scaled_NV, -torch.inf).scatter_(-1, top.indices, top.values)
    if sampling.top_p < 1.0:
        sorted_NV, order_NV = scaled_NV.sort(dim=-1, descending=True, stable=True)
        probs_NV = sorted_NV.softmax(-1)
        mass_before_NV = probs_NV.cumsum(-1, dtype=torch.float64) - probs_NV
        cut_NV = (mass_before_NV >= sampling.top_p).index_fill_(-1, torch.tensor([0], device=probs_NV.device), False)
        scaled_NV = scaled_NV.masked_fill(torch.zeros_like(cut_NV).scatter_(-1, order_NV, cut_NV), -torch.inf)
    return scaled_NV.log_softmax(-1)


def draw(logprobs_NV: torch.Tensor, uniforms_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [N] int64 and their log-probabilities [N] float32.

    The token is the first whose cumulative probability (float64: a vocabulary of 150,000 leaves float32 no digits for
    its tail) exceeds the row's uniform number; a token of probability 0 is never drawn.
    """
    cumulative_NV = logprobs_NV.exp().cumsum(-1, dtype=torch.float64)
    total_N1 = cumulative_NV[:, -1:]
    # u < 1, but u * total may round up to total, past the last token that has any probability
    target_N1 = torch.minimum(uniforms_N[:, None] * total_N1, total_N1.nextafter(torch.zeros_like(total_N1)))
    tokens_N1 = torch.searchsorted(cumulative_NV, target_N1, right=True)
    return tokens_N1[:, 0], logprobs_NV.gather(-1, tokens_N1)[:, 0]

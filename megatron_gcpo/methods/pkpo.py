"""Pass-at-k Policy Optimization (PKPO, arXiv 2505.15201).

The expected best reward of k answers is an objective of its own, for any reward, with an unbiased gradient from groups
of G >= k. Each answer's share is the mean over the sets it belongs to of the set's best reward; the baseline is the
best of the same set without it, which does not depend on it. What is left is how much the answer improves the sets it
joins.

The estimator with this baseline is derived here from its definition and checked against enumeration (it is the paper's
leave-one-out-minus-one form): with rewards ascending and j others below, it is a sum over ordered neighbours of their
gap times the number of sets whose other k - 1 answers all lie at or below the lower one. For k = 1, where the baseline
set would be empty, the baseline is the mean of the others, as in RLOO. Scale (ours): G / k x share, whose mean over
rows is the gradient of the estimate divided by k.
"""

from __future__ import annotations

from math import comb

import torch
from pydantic import PositiveInt

from megatron_gcpo.loss.reduce import Reduction
from megatron_gcpo.methods.base import LossOptions, Method, MethodOptions, centred, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.passk import check_k
from megatron_gcpo.types import Credit, CreditInputs


class PkpoLoss(LossOptions):
    reduce: Reduction = "sequence_mean_fixed_length"


class PkpoOptions(MethodOptions):
    loss: PkpoLoss = PkpoLoss()
    k: PositiveInt = 4
    """Answers of a set; at most rollout.group_size."""


def improvements(rewards_G: torch.Tensor, k: int) -> torch.Tensor:
    """[G] float64: mean over the k-sets with answer i of (best of the set - best of the set without i), k >= 2.

    With the others ascending, x_1 <= .. <= x_(G-1), the best of a random (k-1)-set of them is x_m with C(m - 1, k - 2) of
    C(G - 1, k - 1) chances; answer i adds max(r_i - x_m, 0).
    """
    size = len(rewards_G)
    chances = torch.tensor([comb(m, k - 2) / comb(size - 1, k - 1) for m in range(size - 1)], dtype=torch.float64)
    gains = [
        ((rewards_G[i] - rewards_G[torch.arange(size) != i].sort().values).clamp(min=0) * chances).sum()
        for i in range(size)
    ]
    return torch.stack(gains)


def credit(inputs: CreditInputs, options: PkpoOptions) -> Credit:
    """Improvements of the sets an answer joins. Errors: ValueError for k above the group's size."""
    rewards_G, size = inputs.rewards_G, len(inputs.rewards_G)
    check_k(options.k, size)
    pay_G = centred(rewards_G) * size / (size - 1) if options.k == 1 else improvements(rewards_G, options.k)
    return Credit(credits_G=pay_G, advantages_G=pay_G)


METHOD = Method(
    name="pkpo",
    arxiv="2505.15201",
    summary="how much an answer improves the best reward of the sets of k it joins",
    evidence="paper: objective, baseline; derived: the sum over ordered rewards; ours: scale",
    options=PkpoOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

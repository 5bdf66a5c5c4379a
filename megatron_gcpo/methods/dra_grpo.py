"""Diversity-aware Reward Adjustment (DRA-GRPO, arXiv 2505.09655).

Answers that resemble the rest of their group share its information, and their reward is scaled down by it: r / (1 + sum
over the others of the cosine), the graph-cut form of submodular mutual information. What stands out keeps its reward.
The adjusted rewards then go through GRPO.

Formula verified. Ours: negative sums of cosines count as 0, so that no reward grows or changes its sign.
"""

from __future__ import annotations

import torch

from megatron_gcpo.methods.base import Method, clipped_surrogate, penalized_rewards, standardized
from megatron_gcpo.methods.grpo import GrpoOptions
from megatron_gcpo.types import Credit, CreditInputs


def credit(inputs: CreditInputs, options: GrpoOptions) -> Credit:
    """GRPO's advantage of r / (1 + similarity to the others)."""
    similarity_G = torch.zeros_like(inputs.rewards_G)
    if inputs.embeddings_GD is not None:
        rows_GD = inputs.embeddings_GD.double()
        cosines_GG = rows_GD @ rows_GD.T
        similarity_G = (cosines_GG.sum(1) - cosines_GG.diagonal()).clamp(min=0)
    pay_G = inputs.rewards_G / (1 + similarity_G)
    return Credit(credits_G=pay_G, advantages_G=standardized(pay_G), metrics={"similarity": float(similarity_G.mean())})


METHOD = Method(
    name="dra_grpo",
    arxiv="2505.09655",
    summary="reward divided by 1 + similarity to the rest of the group, then GRPO",
    evidence="paper: the formula; ours: negative similarity counts as 0",
    options=GrpoOptions,
    credit=credit,
    needs=frozenset({"all_embeddings"}),
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

"""Unlikeliness reward (Rewarding the Unlikely, arXiv 2506.02355).

GRPO reinforces what is already likely and neglects the rare answers that are right, which sharpens the policy instead
of widening it. Here the reward of a right answer is scaled by its rank in the group, r (1 - beta (G - rank) / G), with
rank 0 for the most probable answer: the likeliest pays the full discount, the rarest almost none. The scaled rewards
then go through GRPO.

The rank discount is verified second-hand, and beta 0.25. Ours: answers of equal probability share the mean of their
ranks; the probability is that of the whole answer under the sampling distribution.
"""

from __future__ import annotations

import torch
from pydantic import Field

from megatron_gcpo.methods.base import Method, clipped_surrogate, penalized_rewards, standardized
from megatron_gcpo.methods.grpo import GrpoOptions
from megatron_gcpo.types import Credit, CreditInputs


class UnlikelinessOptions(GrpoOptions):
    beta: float = Field(default=0.25, ge=0, le=1)
    """Discount of the most probable answer."""


def credit(inputs: CreditInputs, options: UnlikelinessOptions) -> Credit:
    """GRPO's advantage of the reward discounted by rank of probability."""
    assert inputs.logprobs_G is not None, "got no log-probs of the rollouts, expected the engine's"
    size = len(inputs.rewards_G)
    pay_G = inputs.rewards_G * (1 - options.beta * (size - ranks(inputs.logprobs_G)) / size)
    return Credit(credits_G=pay_G, advantages_G=standardized(pay_G))


def ranks(values_G: torch.Tensor) -> torch.Tensor:
    """[G] float64: 0 for the largest value, equal values share the mean of their ranks."""
    above_G = (values_G[None] > values_G[:, None]).sum(1)
    equal_G = (values_G[None] == values_G[:, None]).sum(1)
    return above_G.double() + (equal_G.double() - 1) / 2


METHOD = Method(
    name="unlikeliness",
    arxiv="2506.02355",
    summary="reward discounted by rank of probability: rare right answers pay most",
    evidence="second-hand: rank discount, beta; ours: ties",
    options=UnlikelinessOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

"""REINFORCE Leave-One-Out (RLOO, arXiv 2402.14740, after Kool et al. 2019).

Language models start from a good policy, so plain REINFORCE works where PPO's machinery was thought necessary. Each
answer's baseline is the mean reward of the *other* answers to the same question: A = r_i - mean of r_j, j other than i.
That baseline does not depend on the answer it judges, so the gradient is unbiased and needs no value function. A whole
answer is one action, so its token log-probabilities are summed.

Ours to choose: the loss is PPO's clipped surrogate, whose gradient at the first update of a step is REINFORCE's and
which bounds later ones; the sum over tokens is divided by rows x rollout.max_new_tokens, a constant; a KL term goes
into the loss (loss.kl_coef), where the paper takes it off the reward.
"""

from __future__ import annotations

from megatron_gcpo.loss.reduce import Reduction
from megatron_gcpo.methods.base import (
    LossOptions,
    Method,
    MethodOptions,
    centred,
    clipped_surrogate,
    penalized_rewards,
)
from megatron_gcpo.types import Credit, CreditInputs


class RlooLoss(LossOptions):
    reduce: Reduction = "sequence_mean_fixed_length"


class RlooOptions(MethodOptions):
    loss: RlooLoss = RlooLoss()


def credit(inputs: CreditInputs, options: MethodOptions) -> Credit:
    """A_i = r_i - mean of the others = G / (G - 1) x (r_i - mean r)."""
    group_size = len(inputs.rewards_G)
    centred_G = centred(inputs.rewards_G)
    return Credit(credits_G=inputs.rewards_G, advantages_G=centred_G * group_size / (group_size - 1))


METHOD = Method(
    name="rloo",
    arxiv="2402.14740",
    summary="reward against the mean of the other rollouts",
    evidence="paper: the baseline; ours: PPO's clip for later updates, KL in the loss",
    options=RlooOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

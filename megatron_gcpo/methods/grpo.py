"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300).

Several answers to one question are sampled, and their rewards are compared with each other instead of with a learned
value function. The advantage of every token of an answer is A = (r - mean r) / std r over the group. The loss is PPO's
clipped surrogate, averaged over the tokens of an answer and then over answers. A k3 penalty towards a reference policy
is added to the loss.

Ours to choose, since the paper leaves it open: the population std, 1e-4 added to it, and one global mean over the rows
of a step. The paper's KL weight of 0.04 is off by default because it needs a reference policy: set loss.kl_coef.
"""

from __future__ import annotations

from megatron_gcpo.loss.reduce import Reduction
from megatron_gcpo.methods.base import (
    LossOptions,
    Method,
    MethodOptions,
    clipped_surrogate,
    penalized_rewards,
    standardized,
)
from megatron_gcpo.types import Credit, CreditInputs


class GrpoLoss(LossOptions):
    reduce: Reduction = "sequence_mean_token_mean"


class GrpoOptions(MethodOptions):
    loss: GrpoLoss = GrpoLoss()


def credit(inputs: CreditInputs, options: MethodOptions) -> Credit:
    """A = (r - mean r) / (population std r + 1e-4)."""
    return Credit(credits_G=inputs.rewards_G, advantages_G=standardized(inputs.rewards_G))


METHOD = Method(
    name="grpo",
    arxiv="2402.03300",
    summary="reward against the group's mean, in units of its spread",
    evidence="paper: advantage and loss; ours: population std, 1e-4, one mean over the step's rows",
    options=GrpoOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

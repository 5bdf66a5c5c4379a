"""GRPO Done Right (Dr.GRPO, arXiv 2503.20783).

GRPO has two biases that are not in policy gradients. Dividing an answer's loss by its own length makes long wrong
answers cheap, and dividing advantages by the group's std overweighs questions that are nearly always or never solved.
Dr.GRPO removes both divisions: A = r - mean r, and token losses are summed and divided by a constant. The rest is GRPO.

Ours to choose: the constant is rows x rollout.max_new_tokens, and the mean over rows is one global mean of the step.
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


class DrGrpoLoss(LossOptions):
    reduce: Reduction = "sequence_mean_fixed_length"


class DrGrpoOptions(MethodOptions):
    loss: DrGrpoLoss = DrGrpoLoss()


def credit(inputs: CreditInputs, options: MethodOptions) -> Credit:
    """A = r - mean r."""
    return Credit(credits_G=inputs.rewards_G, advantages_G=centred(inputs.rewards_G))


METHOD = Method(
    name="dr_grpo",
    arxiv="2503.20783",
    summary="GRPO without dividing by the group's spread or by an answer's length",
    evidence="paper; ours: the constant is rollout.max_new_tokens",
    options=DrGrpoOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

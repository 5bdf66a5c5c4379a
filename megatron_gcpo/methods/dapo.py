"""Decoupled Clip and Dynamic Sampling Policy Optimization (DAPO, arXiv 2503.14476).

GRPO's advantage with four changes for long reasoning. The upper clip range is larger than the lower one, so that
unlikely tokens can grow; the loss is averaged over all tokens, so that long answers are not diluted. Groups whose
answers are all right or all wrong are dropped and sampling goes on until the batch is full, and answers that nearly run
out of room lose reward gradually. There is no KL term.

Ours to choose: sampling stops after ``refill`` extra rounds (the paper's has no end) and groups are dropped by their
final advantages (the same groups, for binary rewards). The overlong penalty is off until overlong.max_tokens and
overlong.buffer are set (the paper: 20480 and 4096); it is 0.5 because rewards lie in [0, 1] here, half the width of the
paper's -1 and 1, which after normalization is the same penalty.
"""

from __future__ import annotations

from pydantic import Field, NonNegativeInt

from megatron_gcpo.methods.base import LossOptions, Method, MethodOptions, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.grpo import credit


class DapoLoss(LossOptions):
    clip_high: float = Field(default=0.28, gt=0)


class DapoOptions(MethodOptions):
    loss: DapoLoss = DapoLoss()
    group_filter: bool = True
    refill: NonNegativeInt = 3


METHOD = Method(
    name="dapo",
    arxiv="2503.14476",
    summary="GRPO with clip-higher, token mean, dynamic sampling and a soft length penalty",
    evidence="paper: all four changes; ours: a bounded number of refill rounds",
    options=DapoOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

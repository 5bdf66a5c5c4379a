"""Clipped Importance Sampling Policy Optimization (CISPO, MiniMax-M1, arXiv 2506.13585).

PPO's clip takes the gradient from tokens whose ratio has moved too far, which are often the rare ones that a chain of
thought turns on. CISPO clips the ratio itself, as a constant weight of the score function: -sg(clip(r)) A log pi. Every
token keeps its gradient and none has an outsized one. The loss is a mean over tokens, advantages are GRPO's.

The paper bounds the ratio from above only and tunes that bound without publishing it; 1 + 4 = 5 is ours, after later
use of the loss.
"""

from __future__ import annotations

import torch
from pydantic import Field

from megatron_gcpo.loss.policy import cispo
from megatron_gcpo.methods.base import LossOptions, Method, MethodOptions, old_logprobs, penalized_rewards
from megatron_gcpo.methods.grpo import credit
from megatron_gcpo.types import TokenBatch, TokenStats


class CispoLoss(LossOptions):
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """1: no bound below."""
    clip_high: float = Field(default=4.0, gt=0)


class CispoOptions(MethodOptions):
    loss: CispoLoss = CispoLoss()


def policy_loss(
    stats: TokenStats, batch: TokenBatch, options: MethodOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The score function, weighted by the clipped ratio."""
    loss = options.loss
    return cispo(stats.logprobs_T, old_logprobs(stats, batch), batch.advantages_T, loss.clip_low, loss.clip_high)


METHOD = Method(
    name="cispo",
    arxiv="2506.13585",
    summary="score function weighted by a clipped, constant ratio: no token loses its gradient",
    evidence="paper: the loss; ours: the upper bound 5",
    options=CispoOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=policy_loss,
)

"""Group Sequence Policy Optimization (GSPO, arXiv 2507.18071).

The unit of the reward is the answer, so the importance ratio should be the answer's too. GSPO's ratio is the geometric
mean of the token ratios, s = exp(mean_t log r_t), and PPO's clipped surrogate is taken of it, once for each answer. All
tokens of an answer then carry the same weight, which keeps mixtures of experts stable. Advantages are GRPO's.

The clip range is two orders of magnitude tighter than for tokens, since a mean of many log-ratios moves less: 3e-4 and
4e-4, as the paper trains.
"""

from __future__ import annotations

import torch
from pydantic import Field

from megatron_gcpo.loss.policy import sequence_clip
from megatron_gcpo.loss.reduce import Reduction
from megatron_gcpo.methods.base import LossOptions, Method, MethodOptions, old_logprobs, penalized_rewards
from megatron_gcpo.methods.grpo import credit
from megatron_gcpo.types import TokenBatch, TokenStats


class GspoLoss(LossOptions):
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    clip_high: float = Field(default=4e-4, gt=0)
    reduce: Reduction = "sequence_mean_token_mean"


class GspoOptions(MethodOptions):
    loss: GspoLoss = GspoLoss()


def policy_loss(
    stats: TokenStats, batch: TokenBatch, options: MethodOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One clipped ratio for a row, on each of its tokens."""
    loss = options.loss
    return sequence_clip(stats.logprobs_T, old_logprobs(stats, batch), batch, loss.clip_low, loss.clip_high)


METHOD = Method(
    name="gspo",
    arxiv="2507.18071",
    summary="one ratio for an answer: the geometric mean of its tokens', clipped",
    evidence="paper: ratio, clip, clip range",
    options=GspoOptions,
    credit=credit,
    unit="sequence",
    shape_rewards=penalized_rewards,
    policy_loss=policy_loss,
)

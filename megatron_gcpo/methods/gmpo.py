"""Geometric-Mean Policy Optimization (GMPO, arXiv 2507.20673).

GRPO maximizes the arithmetic mean of its tokens' weighted ratios, and single outliers rule it. GMPO maximizes the
geometric mean: exp of the mean log-ratio, times the advantage. Each token's ratio is clipped before the mean is taken,
in a range that can be wide, as an outlier counts only with its logarithm. Advantages are GRPO's.

Here clip_low and clip_high bound the logarithm of a token's ratio, by 0.4 on both sides as in the paper.
"""

from __future__ import annotations

import torch
from pydantic import Field

from megatron_gcpo.loss.policy import geometric_mean_of_clipped
from megatron_gcpo.loss.reduce import Reduction
from megatron_gcpo.methods.base import LossOptions, Method, MethodOptions, old_logprobs, penalized_rewards
from megatron_gcpo.methods.grpo import credit
from megatron_gcpo.types import TokenBatch, TokenStats


class GmpoLoss(LossOptions):
    clip_low: float = Field(default=0.4, gt=0)
    """The log-ratio of a token is clipped below at -clip_low."""
    clip_high: float = Field(default=0.4, gt=0)
    """The log-ratio of a token is clipped above at clip_high."""
    reduce: Reduction = "sequence_mean_token_mean"


class GmpoOptions(MethodOptions):
    loss: GmpoLoss = GmpoLoss()


def policy_loss(
    stats: TokenStats, batch: TokenBatch, options: MethodOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One loss for a row, on each of its tokens."""
    loss, old_T = options.loss, old_logprobs(stats, batch)
    return geometric_mean_of_clipped(stats.logprobs_T, old_T, batch, loss.clip_low, loss.clip_high)


METHOD = Method(
    name="gmpo",
    arxiv="2507.20673",
    summary="geometric mean of token ratios, each clipped in its logarithm",
    evidence="paper: the mean, token clip, range",
    options=GmpoOptions,
    credit=credit,
    unit="sequence",
    shape_rewards=penalized_rewards,
    policy_loss=policy_loss,
)

"""Soft Adaptive Policy Optimization (SAPO, arXiv 2511.20347).

A hard clip drops a token at the edge of the trust region and keeps its neighbour whole. SAPO replaces the clip by a
smooth gate: (4 / tau) sigmoid(tau (r - 1)) in place of the ratio, whose slope is 1 on policy and falls off on both
sides. Tokens with negative advantages spread probability over the whole vocabulary, so their temperature is a little
higher. The rest is GRPO.

Formula and temperatures are verified; the reduction is GRPO's.
"""

from __future__ import annotations

import torch
from pydantic import Field

from megatron_gcpo.loss.policy import soft_gate
from megatron_gcpo.methods.base import Method, old_logprobs, penalized_rewards
from megatron_gcpo.methods.grpo import GrpoOptions, credit
from megatron_gcpo.types import TokenBatch, TokenStats


class SapoOptions(GrpoOptions):
    tau_pos: float = Field(default=1.0, gt=0)
    """Steepness of the gate for tokens with positive advantage."""
    tau_neg: float = Field(default=1.05, gt=0)
    """For tokens with negative advantage."""


def policy_loss(
    stats: TokenStats, batch: TokenBatch, options: SapoOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The gated ratio; there is no clip."""
    old_T = old_logprobs(stats, batch)
    return soft_gate(stats.logprobs_T, old_T, batch.advantages_T, options.tau_pos, options.tau_neg)


METHOD = Method(
    name="sapo",
    arxiv="2511.20347",
    summary="a smooth gate on the ratio in place of the clip",
    evidence="formula and temperatures as published implementations of the paper state them",
    options=SapoOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=policy_loss,
)

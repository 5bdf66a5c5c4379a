"""HoelderPO (arXiv 2605.12058).

GRPO averages an answer's token ratios arithmetically, GSPO and GMPO geometrically; both are power means, of exponents 1
and 0. HoelderPO takes rho_p = (mean_t r_t^p)^(1/p) with PPO's clip on the answer and anneals p: a large p listens to
the tokens that moved most, a negative one to those that lag behind. Advantages are those of Dr.GRPO, r - mean r.

The exponent runs from 2 to -2 in a straight line over the run, the paper's schedule for maths; formula, code and
defaults are verified. Each update uses the exponent of its step.
"""

from __future__ import annotations

from dataclasses import replace
from math import cos, pi
from typing import Literal

import torch

from megatron_gcpo.loss.policy import sequence_clip
from megatron_gcpo.loss.reduce import Reduction
from megatron_gcpo.methods.base import LossOptions, Method, MethodOptions, old_logprobs, penalized_rewards
from megatron_gcpo.methods.dr_grpo import credit
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.types import TokenBatch, TokenStats


class HolderLoss(LossOptions):
    reduce: Reduction = "sequence_mean_token_mean"


class HolderOptions(MethodOptions):
    loss: HolderLoss = HolderLoss()
    p_start: float = 2.0
    """Exponent of the first step."""
    p_end: float = -2.0
    """Exponent of the last step."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How p goes from one to the other; constant: p_start throughout."""


def exponent(options: HolderOptions, progress: float) -> float:
    """p after a share of the run."""
    match options.schedule:
        case "constant":
            share = 0.0
        case "cosine":
            share = (1 - cos(pi * progress)) / 2
        case "linear":
            share = progress
    return options.p_start + share * (options.p_end - options.p_start)


def prepare(batch: TokenBatch, stats: TokenStats, options: HolderOptions, state: State, scope: Scope) -> Prepared:
    """The exponent of this step, as a constant."""
    p = exponent(options, scope.progress)
    return Prepared(batch=replace(batch, scalars={**batch.scalars, "holder_p": p}), metrics={"holder_p": p})


def policy_loss(
    stats: TokenStats, batch: TokenBatch, options: HolderOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped power mean of a row's ratios, on each of its tokens."""
    loss, old_T, p = options.loss, old_logprobs(stats, batch), batch.scalars["holder_p"]
    return sequence_clip(stats.logprobs_T, old_T, batch, loss.clip_low, loss.clip_high, p)


METHOD = Method(
    name="holderpo",
    arxiv="2605.12058",
    summary="clipped power mean of an answer's token ratios, with an annealed exponent",
    evidence="paper and code: mean, clip, schedule, defaults",
    options=HolderOptions,
    credit=credit,
    prepare=prepare,
    unit="sequence",
    shape_rewards=penalized_rewards,
    policy_loss=policy_loss,
)

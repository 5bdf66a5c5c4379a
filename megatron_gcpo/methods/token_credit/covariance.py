"""Weights from a Gaussian kernel of each token's covariance (CW-GRPO, arXiv 2605.11538; formula verified second-hand).

With c = (log pi - mean log pi)(A - mean A) over the tokens of the step, and sigma its std, w = exp(-c^2 / (2 sigma^2)),
scaled to mean 1. Tokens at the tail of the covariance, which drive the entropy down or up fastest, are nearly left out;
there is nothing to tune, and the scale of c does not matter.
"""

from __future__ import annotations

from typing import Literal

import torch

from megatron_gcpo.config.records import Record
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.methods.token_credit.base import TokenCredit, reweighed
from megatron_gcpo.types import TokenBatch, TokenStats

ROUNDING = 1e-7
"""A spread of c below this share of the product of spreads is that of float32 inputs, not of covariances."""


class CovarianceOptions(Record):
    name: Literal["cw"] = "cw"


def covariances(batch: TokenBatch, stats: TokenStats, scope: Scope) -> tuple[torch.Tensor, float]:
    """([T] float64 centred log-probability x centred advantage, 0 off the mask; product of their stds). Collective."""
    mean_logprob, std_logprob = scope.mean(stats.logprobs_T, batch.mask_T)
    mean_advantage, std_advantage = scope.mean(batch.advantages_T, batch.mask_T)
    c_T = (stats.logprobs_T.double() - mean_logprob) * (batch.advantages_T.double() - mean_advantage)
    return torch.where(batch.mask_T > 0, c_T, 0), std_logprob * std_advantage


def apply(batch: TokenBatch, stats: TokenStats, options: CovarianceOptions, state: State, scope: Scope) -> Prepared:
    c_T, size = covariances(batch, stats, scope)
    _, sigma = scope.mean(c_T, batch.mask_T)
    if sigma <= ROUNDING * size:
        return reweighed(batch, torch.ones_like(c_T), {"cw_sigma": sigma})
    weights_T = torch.exp(-(c_T**2) / (2 * sigma**2))
    mean, _ = scope.mean(weights_T, batch.mask_T)
    return reweighed(batch, weights_T / mean, {"cw_sigma": sigma, "cw_mean_weight": mean})


TOKEN_CREDIT = TokenCredit(apply=apply)

"""Clip-Cov and KL-Cov: hold back the few tokens whose covariance drives the entropy down (arXiv 2505.22617).

The covariance of a token is (log pi - mean log pi)(A - mean A), as in ``covariance``.
Clip-Cov takes the gradient from a random share of the tokens whose covariance lies within a band. Ours: each token of the
band is drawn on its own, by a hash of its row's tokens and its place, with the probability that gives ``share`` in the mean,
so that neither the layout nor the order of rows matters.
KL-Cov adds ``coef`` x |log pi - log old| to the loss of the share of tokens with the largest covariance; tokens that tie with
the last of them are held too.
Shares and bands are those of the published implementation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from megatron_gcpo.config.records import Record
from megatron_gcpo.loss.rows import on_tokens, row_of_token
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.methods.select import kth_largest
from megatron_gcpo.methods.token_credit.base import TokenCredit, reweighed
from megatron_gcpo.methods.token_credit.covariance import covariances
from megatron_gcpo.types import TokenBatch, TokenStats

HASH_PRIME = 2_147_483_629
"""Below 2^31, so that products of residues fit int64."""


class ClipCov(Record):
    name: Literal["clip_cov"] = "clip_cov"
    share: float = Field(default=2e-4, gt=0, le=1)
    """Of the trained tokens of a step, expected to lose their gradient."""
    low: float = 1.0
    """Least covariance of the band."""
    high: float = 5.0
    """Largest covariance of the band."""


class KlCov(Record):
    name: Literal["kl_cov"] = "kl_cov"
    share: float = Field(default=2e-4, gt=0, le=1)
    """Of the trained tokens of a step, held to the old policy; at least one."""
    coef: float = Field(default=1.0, gt=0)
    """Weight of |log pi - log old| on those tokens."""


def clip_cov(batch: TokenBatch, stats: TokenStats, options: ClipCov, state: State, scope: Scope) -> Prepared:
    c_T, _ = covariances(batch, stats, scope)
    band_T = (c_T > options.low) & (c_T < options.high) & (batch.mask_T > 0)
    in_band, trained = scope.sum(torch.stack([band_T.double().sum(), batch.mask_T.double().sum()])).tolist()
    probability = min(options.share * trained / in_band, 1.0) if in_band else 0.0
    cut_T = band_T & (uniforms(batch, scope.step) < probability)
    (cut,) = scope.sum(cut_T.double().sum()[None]).tolist()
    return reweighed(batch, (~cut_T).double(), {"clip_cov_share": cut / max(trained, 1)})


def kl_cov(batch: TokenBatch, stats: TokenStats, options: KlCov, state: State, scope: Scope) -> Prepared:
    c_T, _ = covariances(batch, stats, scope)
    (trained,) = scope.sum(batch.mask_T.double().sum()[None]).tolist()
    if not trained:
        return Prepared(batch=batch)
    c_T = c_T.float()
    least = kth_largest(c_T[batch.mask_T > 0], max(int(options.share * trained), 1), scope.sum)
    held_T = (c_T >= least) & (batch.mask_T > 0)
    (held,) = scope.sum(held_T.double().sum()[None]).tolist()
    coef_T = options.coef * held_T.float()
    return Prepared(batch=replace(batch, old_kl_coef_T=coef_T), metrics={"kl_cov_share": held / trained})


def uniforms(batch: TokenBatch, step: int) -> torch.Tensor:
    """[T] float64 in [0, 1): a hash of (step, the row's tokens, place in the row), wherever the row lies."""
    starts_T = on_tokens(batch.cu_seqlens_N1[:-1], batch)
    place_T = torch.arange(len(batch.tokens_T)) - starts_T
    mixed_T = _mix(batch.tokens_T + 7919 * (place_T + 1))
    rows_N = torch.zeros(batch.num_rows, dtype=torch.int64).index_add(0, row_of_token(batch), mixed_T) % HASH_PRIME
    return _mix(on_tokens(rows_N, batch) + 104_729 * (place_T + 1) + 15_485_863 * (step + 1)).double() / HASH_PRIME


def _mix(values_T: torch.Tensor) -> torch.Tensor:
    for factor in (48_271, 69_621, 1_226_874_159):
        values_T = (values_T % HASH_PRIME * factor + 12_345) % HASH_PRIME
        values_T = values_T ^ (values_T >> 13)
    return values_T % HASH_PRIME


CLIP_COV = TokenCredit(apply=clip_cov)
KL_COV = TokenCredit(
    apply=kl_cov, updates="many", why="the first update starts at the old policy, where |log pi - log old| has no slope"
)

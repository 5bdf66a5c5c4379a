"""Weights by the polarity of each token's entropy move (PAPO, arXiv 2605.11775).

The sign of A T, with T the move of ``flow`` (full form; the polarity is derived), says whether a token's update widens the
policy's distribution or narrows it. Both kinds stay in the update, and which of them counts more follows the entropy.

The rule is our reconstruction, as the paper's is not public: factor 1 + kappa for widening tokens and 1 - kappa for
narrowing ones, kappa = strength x tanh((H_ref - H) / (scale H_ref)), where H is the step's mean entropy and H_ref that of the
first step (``reference: start``) or a moving average (``reference: ema``). At H = H_ref nothing changes.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from megatron_gcpo.config.records import Record
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.methods.token_credit.base import TokenCredit, reweighed
from megatron_gcpo.methods.token_credit.flow import entropy_moves
from megatron_gcpo.types import TokenBatch, TokenStats


class PolarityOptions(Record):
    name: Literal["papo"] = "papo"
    strength: float = Field(default=0.5, gt=0, lt=1)
    """Largest |kappa|: below 1, so that no token is left out."""
    scale: float = Field(default=0.25, gt=0)
    """Share of H_ref by which the entropy must differ for three quarters of the strength."""
    reference: Literal["start", "ema"] = "start"
    """The entropy that is kept: the first step's, or a moving average."""
    decay: float = Field(default=0.95, ge=0, lt=1)
    """Of the moving average, per step."""


def apply(batch: TokenBatch, stats: TokenStats, options: PolarityOptions, state: State, scope: Scope) -> Prepared:
    entropy, _ = scope.mean(stats.entropy_T, batch.mask_T)
    reference = state.get("entropy", entropy)
    kappa = options.strength * math.tanh((reference - entropy) / (options.scale * reference)) if reference > 0 else 0.0
    weights_T = 1 + kappa * entropy_moves(batch, stats).sign()
    kept = reference if options.reference == "start" else options.decay * reference + (1 - options.decay) * entropy
    (trained,) = scope.sum(batch.mask_T.double().sum()[None]).tolist()
    return reweighed(
        batch, weights_T, {"papo_kappa": kappa, "papo_reference": reference}, {"entropy": kept} if trained else state
    )


TOKEN_CREDIT = TokenCredit(apply=apply, second_moments=True)

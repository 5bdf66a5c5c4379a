"""How hard the policy is held to its reference: the weight of the KL term at each step.

fixed     the weight of loss.kl_coef.
adaptive  raised when the measured KL is above a target and lowered below it (Ziegler et al., arXiv 1909.08593): the weight
          is multiplied by 1 + clip(KL / target - 1, -0.2, 0.2) x rollouts / horizon. KL is measured as the mean of
          log pi - log ref over the trained tokens of the step, before its update.
expo      kl_coef (tanh(accuracy) + 1) / 2 with the step's mean reward as accuracy (EXPO, arXiv 2605.09923, verified): half
          the weight while nothing is solved, 0.88 of it when all is, so that exploring is cheap where it is needed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field

from megatron_gcpo.config.named import by_name
from megatron_gcpo.config.records import Record
from megatron_gcpo.loss.kl import k1
from megatron_gcpo.loss.rows import row_of_token
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.types import TokenBatch

ERROR_LIMIT = 0.2


class FixedKl(Record):
    name: Literal["fixed"] = "fixed"


class AdaptiveKl(Record):
    name: Literal["adaptive"] = "adaptive"
    target: float = Field(default=0.05, gt=0)
    """KL to the reference per token, nats, that the weight steers to."""
    horizon: float = Field(default=10_000.0, gt=0)
    """Rollouts over which a lasting error of 20% or more changes the weight by a factor of about e^0.2."""


class ExpoKl(Record):
    name: Literal["expo"] = "expo"


KlController = Annotated[
    Annotated[FixedKl | AdaptiveKl | ExpoKl, Field(discriminator="name")], BeforeValidator(by_name)
]


def weight(
    batch: TokenBatch, controller: FixedKl | AdaptiveKl | ExpoKl, base: float, state: State, scope: Scope
) -> Prepared:
    """The batch with ``scalars["kl_coef"]``, the weight of this step. base: loss.kl_coef. Collective over replicas."""
    match controller:
        case FixedKl():
            return _set(batch, base, {})
        case ExpoKl():
            return _set(batch, base * (math.tanh(batch.scalars["accuracy"]) + 1) / 2, {})
        case AdaptiveKl():
            now = state.get("kl_coef", base)
            assert batch.old_logprobs_T is not None, "got no old log-probs, expected those that a KL is measured with"
            assert batch.ref_logprobs_T is not None, "got no reference log-probs, expected those of the KL term"
            kl, _ = scope.mean(k1(batch.old_logprobs_T, batch.ref_logprobs_T), batch.mask_T)
            (rows,) = scope.sum(torch.tensor([batch.num_rows], dtype=torch.float64)).tolist()
            error = min(max(kl / controller.target - 1, -ERROR_LIMIT), ERROR_LIMIT)
            return _set(batch, now, {"kl_coef": now * (1 + error * min(rows / controller.horizon, 1))})


def into_advantages(batch: TokenBatch, penalty_T: torch.Tensor, coef: float) -> torch.Tensor:
    """[T] float32 advantages less coef x the penalty still to come: sum of penalty over the row's tokens from t on.

    The score-function gradient of a penalty per token: a token answers for what follows it, not for what came before
    (derived; with discount 1).
    """
    masked_T = penalty_T.double() * batch.mask_T
    upto_T = masked_T.cumsum(0)
    ends_N = upto_T[batch.cu_seqlens_N1[1:] - 1] if len(upto_T) else upto_T
    remaining_T = ends_N[row_of_token(batch)] - upto_T + masked_T
    return (batch.advantages_T - coef * remaining_T * batch.mask_T).float()


def _set(batch: TokenBatch, coef: float, state: State) -> Prepared:
    scalars = {**batch.scalars, "kl_coef": coef}
    return Prepared(batch=replace(batch, scalars=scalars), state=state, metrics={"kl_coef": coef})

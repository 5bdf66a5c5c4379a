"""Phase one of the loss: everything that couples a group or the batch becomes constants of tokens, before any update.

A method's gradient is a sum of c_t grad log pi_t, plus terms local to a token. The c_t may depend on all of a step's
tokens, but not on the update: they are computed here, from the statistics of the policy that is about to be updated,
summed over replicas where they must be, and enter the micro-batches as constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from megatron_gcpo.loss.kl import KL_ESTIMATORS
from megatron_gcpo.methods import kl
from megatron_gcpo.methods.base import Method
from megatron_gcpo.methods.options import MethodOptions
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.methods.token_credit.table import TOKEN_CREDITS
from megatron_gcpo.types import TokenBatch, TokenStats

type States = Mapping[str, State]
"""What each part of phase one remembers, under "kl", "method" or the name of the token credit. JSON-able."""


@dataclass
class Memory:
    """What phase one carries from step to step; the same on every rank, and saved with every checkpoint."""

    states: States = field(default_factory=dict)


def prepare(
    method: Method,
    options: MethodOptions,
    batch: TokenBatch,
    stats: TokenStats | None,
    states: States,
    scope: Scope,
) -> tuple[TokenBatch, States, dict[str, float]]:
    """(batch with its constants, the states after this step, metrics). Collective over replicas, alike within one.

    In this order: the weight of the KL term; a KL penalty into the advantages; the method's own part; the chain of token
    credit. stats: of the old policy, None when nothing here needs it.
    """
    after: dict[str, State] = {}
    metrics: dict[str, float] = {}

    def take(name: str, prepared: Prepared) -> TokenBatch:
        if prepared.state:
            after[name] = prepared.state
        metrics.update(prepared.metrics)
        return prepared.batch

    with torch.no_grad():
        if options.loss.kl_coef > 0:
            loss = options.loss
            batch = take("kl", kl.weight(batch, loss.kl_controller, loss.kl_coef, states.get("kl", {}), scope))
            if loss.kl_in == "reward":
                batch = _penalized(batch, loss.kl_estimator)
        if method.prepare is not None:
            assert stats is not None, "got no statistics of the old policy, expected a pass before phase one"
            batch = take("method", method.prepare(batch, stats, options, states.get("method", {}), scope))
        for part in options.token_credit:
            assert stats is not None, "got no statistics of the old policy, expected a pass before phase one"
            row = TOKEN_CREDITS[part.name]
            batch = take(part.name, row.apply(batch, stats, part, states.get(part.name, {}), scope))
    return batch, after, metrics


def without_unsampled(batch: TokenBatch) -> TokenBatch:
    """The batch after the pass of the old policy: tokens that no engine drew (NaN) count as drawn from that policy.

    Corrections between engine and trainer then weigh them 1 and see no gap.
    """
    if batch.rollout_logprobs_T is None or batch.old_logprobs_T is None:
        return batch
    drawn_T = batch.rollout_logprobs_T
    return replace(batch, rollout_logprobs_T=torch.where(drawn_T.isnan(), batch.old_logprobs_T, drawn_T))


def _penalized(batch: TokenBatch, estimator: str) -> TokenBatch:
    assert batch.old_logprobs_T is not None, "got no old log-probs, expected those of the penalty"
    assert batch.ref_logprobs_T is not None, "got no reference log-probs, expected those of the penalty"
    penalty_T = KL_ESTIMATORS[estimator](batch.old_logprobs_T, batch.ref_logprobs_T)
    return replace(batch, advantages_T=kl.into_advantages(batch, penalty_T, batch.scalars["kl_coef"]))

"""RSPO in its autoregressive form (arXiv 2605.10218).

RSPO regresses the policy's drift onto its advantage: with d an answer's mean log-ratio to the reference per token and
d_hat its difference from the step's mean, it descends on lambda/2 (d_hat - A / lambda)^2. The gradient -(A - lambda
d_hat) grad d pushes an answer until its drift matches its advantage, and pulls it back beyond. At lambda = 0 it is
REINFORCE.

The paper trains diffusion models, where d is an estimate; here log-ratios are exact. Formula and lambda are verified
second-hand. The step's mean is a constant, so phase one computes A - lambda d_hat; exact for one update a step.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from megatron_gcpo.loss.rows import on_tokens, row_means, trained_tokens
from megatron_gcpo.methods.base import Method, penalized_rewards
from megatron_gcpo.methods.conspo import policy_loss
from megatron_gcpo.methods.grpo import GrpoOptions, credit
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.types import TokenBatch, TokenStats


class RspoOptions(GrpoOptions):
    lam: float = Field(default=0.01, ge=0)
    """lambda: advantage per nat of drift."""


def prepare(batch: TokenBatch, stats: TokenStats, options: RspoOptions, state: State, scope: Scope) -> Prepared:
    """Advantages less lambda x (row's drift - mean drift over the rows of all replicas)."""
    assert batch.ref_logprobs_T is not None, "got no reference log-probs, expected those of the drift"
    drift_N = row_means(stats.logprobs_T.double() - batch.ref_logprobs_T.double(), batch)
    mean, spread = scope.mean(drift_N, (trained_tokens(batch) > 0).double())
    advantages_T = batch.advantages_T.double() - options.lam * on_tokens(drift_N - mean, batch)
    advantages_T = (advantages_T * batch.mask_T).float()
    return Prepared(
        batch=replace(batch, advantages_T=advantages_T), metrics={"rspo_drift": mean, "rspo_drift_std": spread}
    )


METHOD = Method(
    name="rspo",
    arxiv="2605.10218",
    summary="regression of an answer's drift from the reference onto its advantage",
    evidence="second-hand: loss, lambda; the exact autoregressive drift stands in for the diffusion model's estimate",
    options=RspoOptions,
    credit=credit,
    needs=frozenset({"ref_logprobs"}),
    prepare=prepare,
    one_update=True,
    shape_rewards=penalized_rewards,
    policy_loss=policy_loss,
)

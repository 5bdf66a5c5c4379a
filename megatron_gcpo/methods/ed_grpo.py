"""ED-GRPO: GRPO that is pushed away from what the starting policy would have said (arXiv 2605.09853).

The paper adds an exploration term in the manner of reward-biased estimation to GRPO and to iterative DPO. Here it is
alpha E_{y ~ ref}[mean log pi of y's tokens], added to the loss (methods/exploration.py says how).

Verified: the abstract only. The term is our reconstruction from value-incentivized preference optimization, which has
one of the authors in common; alpha, the mean over tokens and the truncated ratio are ours.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from megatron_gcpo.loss.rows import on_tokens
from megatron_gcpo.methods.base import Method, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.exploration import push, truncated_share
from megatron_gcpo.methods.grpo import GrpoOptions, credit
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.types import TokenBatch, TokenStats


class EdGrpoOptions(GrpoOptions):
    alpha: float = Field(default=1e-3, ge=0)
    """Weight of the exploration term; 0: GRPO."""
    max_ratio: float = Field(default=5.0, gt=1)
    """Largest ref(y) / pi(y) that an answer counts with."""


def prepare(batch: TokenBatch, stats: TokenStats, options: EdGrpoOptions, state: State, scope: Scope) -> Prepared:
    """Advantages less alpha x the push of their row: exact for one update, bounded by the clip after it."""
    push_N = push(batch, stats, options.max_ratio)
    advantages_T = batch.advantages_T.double() - options.alpha * on_tokens(push_N, batch)
    advantages_T = (advantages_T * batch.mask_T).float()
    share = truncated_share(push_N, batch, options.max_ratio, scope)
    return Prepared(batch=replace(batch, advantages_T=advantages_T), metrics={"exploration_truncated_share": share})


METHOD = Method(
    name="ed_grpo",
    arxiv="2605.09853",
    summary="GRPO that is pushed away from the starting policy's answers",
    evidence="abstract: exploration term on GRPO; reconstruction: the term; derived: its gradient from policy answers",
    options=EdGrpoOptions,
    credit=credit,
    needs=frozenset({"ref_logprobs"}),
    prepare=prepare,
    one_update=True,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

"""VIGOR: no verifier, an answer is as good as its gradient is small (arXiv 2605.09920).

An answer that the policy finds natural moves it little. The score of an answer of T tokens is -sqrt(T) ||g||, with g the
gradient of its mean negative log-likelihood; sqrt(T) undoes the shrinking of a mean of T independent terms. Scores become
ranks within the group, 2 rank / (G - 1) - 1, and the ranks are standardized. The verifier's rewards are only measured.

Verified in the authors' code: score, ranks, standardization. The gradient is that of the output layer alone, the
approximation of the paper's appendix: g = 1/T sum_t (p_t - e_t) h_t^T has the squared norm 1/T^2 sum_{s,t}
(d_s . d_t)(h_s . h_t), two Gram matrices instead of a backward pass (derived; policy/head.py). Ours: equal scores
share the mean of their ranks, population std.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_gcpo.loss.rows import on_tokens, row_sums, trained_tokens
from megatron_gcpo.methods.base import Method, centred, clipped_surrogate, penalized_rewards, standardized
from megatron_gcpo.methods.grpo import GrpoOptions
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.types import Credit, CreditInputs, TokenBatch, TokenStats

DIGITS = 14
"""Bits of a score that count: sums of another order must not tell equal answers apart."""


class VigorOptions(GrpoOptions):
    pass


def credit(inputs: CreditInputs, options: VigorOptions) -> Credit:
    """Nothing yet: phase one ranks the gradients. ValueError for a group of one."""
    return Credit(credits_G=inputs.rewards_G, advantages_G=centred(torch.zeros_like(inputs.rewards_G)))


def ranks(scores_G: torch.Tensor) -> torch.Tensor:
    """[G] float64 in [-1, 1]: 1 for the largest score, -1 for the smallest, equal scores alike; 0 for one score."""
    if len(scores_G) < 2:
        return torch.zeros_like(scores_G)
    below_G = (scores_G[None] < scores_G[:, None]).sum(1).double()
    equal_G = (scores_G[None] == scores_G[:, None]).sum(1).double()
    return 2 * (below_G + (equal_G - 1) / 2) / (len(scores_G) - 1) - 1


def prepare(batch: TokenBatch, stats: TokenStats, options: VigorOptions, state: State, scope: Scope) -> Prepared:
    """Standardized ranks of -sqrt(T) ||g|| = -sqrt(squared norm of the sum / T)."""
    assert stats.head_gram_T is not None, "got no gradients of the output layer, expected the need head_gram"
    lengths_N = trained_tokens(batch)
    scores_N = -(row_sums(stats.head_gram_T.double(), batch).clamp(min=0) / lengths_N.clamp(min=1)).sqrt()
    mantissa_N, exponent_N = scores_N.frexp()
    scores_N = mantissa_N.mul(2**DIGITS).round().div(2**DIGITS).ldexp(exponent_N)
    advantages_N = torch.zeros_like(scores_N)
    for group in batch.group_N.unique():
        rows = (batch.group_N == group) & (lengths_N > 0)
        if int(rows.sum()) > 1:
            advantages_N[rows] = standardized(ranks(scores_N[rows]))
    advantages_T = (on_tokens(advantages_N, batch) * batch.mask_T).float()
    mean, spread = scope.mean(-scores_N, (lengths_N > 0).double())
    return Prepared(
        batch=replace(batch, advantages_T=advantages_T),
        metrics={"vigor_gradient": mean, "vigor_gradient_std": spread},
    )


METHOD = Method(
    name="vigor",
    arxiv="2605.09920",
    summary="no verifier: answers with the smaller gradient of the output layer win",
    evidence="authors' code: score, ranks; paper's appendix: output layer alone; derived: Gram form",
    options=VigorOptions,
    credit=credit,
    needs=frozenset({"old_logprobs", "head_gram"}),
    prepare=prepare,
    reads_rewards=False,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

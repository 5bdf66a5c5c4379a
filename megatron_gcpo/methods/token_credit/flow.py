"""How each token's update moves the entropy, and a weight that keeps the sum of the moves at zero (OPEFO, arXiv 2605.11491).

A step of size eta A on the log-probability of the sampled token a changes the entropy of its distribution by eta times

    full      A [-p_a (log p_a + H) + sum_v p_v^2 log p_v + H sum_v p_v^2]
    sampled   -A p_a (log p_a + H)

to first order (derived, for a softmax whose logits move by the gradient). OPEFO multiplies the advantages of tokens that raise
the entropy by 1 + lambda and of those that lower it by 1 - lambda, with lambda = (S- - S+) / (S- + S+) of the sums of their
moves: the predicted flow is then 0. Signs never flip, since |lambda| < 1 unless all tokens move it the same way.

lambda is verified second-hand; which form of the move the paper uses is our reconstruction (``dh``): ``sampled`` leaves out
what happens to the other tokens, and its mean over the distribution is not 0 as that of ``full`` is.
"""

from __future__ import annotations

from typing import Literal

import torch

from megatron_gcpo.config.records import Record
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.methods.token_credit.base import TokenCredit, reweighed
from megatron_gcpo.types import TokenBatch, TokenStats

type Form = Literal["full", "sampled"]


class FlowOptions(Record):
    name: Literal["opefo"] = "opefo"
    dh: Form = "full"
    """First-order change of the entropy: with the other tokens of the distribution, or the sampled one alone."""


def entropy_moves(batch: TokenBatch, stats: TokenStats, form: Form = "full") -> torch.Tensor:
    """[T] float64 change of the entropy (nats) per unit of step size on the token's logits, 0 off the mask."""
    logprob_T, entropy_T = stats.logprobs_T.double(), stats.entropy_T.double()
    move_T = -logprob_T.exp() * (logprob_T + entropy_T)
    if form == "full":
        assert stats.sum_p2_T is not None, "got no second moments, expected those that the full move needs"
        assert stats.sum_p2_logp_T is not None, "got no second moments, expected those that the full move needs"
        move_T = move_T + stats.sum_p2_logp_T.double() + entropy_T * stats.sum_p2_T.double()
    return torch.where(batch.mask_T > 0, batch.advantages_T.double() * move_T, 0)


def apply(batch: TokenBatch, stats: TokenStats, options: FlowOptions, state: State, scope: Scope) -> Prepared:
    moves_T = entropy_moves(batch, stats, options.dh)
    raised, lowered = scope.sum(torch.stack([moves_T.clamp(min=0).sum(), -moves_T.clamp(max=0).sum()])).tolist()
    lam = (lowered - raised) / (lowered + raised) if lowered + raised > 0 else 0.0
    weights_T = 1 + lam * moves_T.sign()
    return reweighed(batch, weights_T, {"opefo_lambda": lam, "entropy_flow": raised - lowered})


TOKEN_CREDIT = TokenCredit(
    apply=apply,
    second_moments=True,
    updates="one",
    why="its balance holds for the policy that the statistics were taken from",
)

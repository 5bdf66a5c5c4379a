"""ConSPO (arXiv 2605.12969).

GRPO widens the gap of correct and wrong answers whatever it already is. ConSPO scores an answer by its mean
log-probability per token, s, and contrasts each correct one with the wrong ones of its group:

    L = mean over correct i of -log [ e^((s_i - m)/tau) / (e^((s_i - m)/tau) + sum over wrong j of e^(s_j/tau)) ]

so that answers which are already told apart stop pushing. The margin m grows during training.

Phase one turns it into constants: with p_i the bracket and q_ij the share of wrong answer j in it, the gradient is that
of sum_i -(1 - p_i)/(tau K) s_i + sum_j (sum_i q_ij)/(tau K) s_j (derived; K correct answers). Exact for one update a
step.

Verified second-hand: score, loss, growing margin. Our reconstruction: tau, and the margin's straight line from 0 (that
m stands at s_i; at every s_j with the other sign it would be the same loss, in the numerator alone it would do
nothing).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from megatron_gcpo.loss.policy import reinforce
from megatron_gcpo.loss.rows import on_tokens, row_means, trained_tokens
from megatron_gcpo.methods.base import LossOptions, Method, MethodOptions, old_logprobs, penalized_rewards
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.types import Credit, CreditInputs, TokenBatch, TokenStats


class ConspoLoss(LossOptions):
    reduce: Literal["sequence_mean_token_mean"] = "sequence_mean_token_mean"


class ConspoOptions(MethodOptions):
    loss: ConspoLoss = ConspoLoss()
    tau: float = Field(default=0.5, gt=0)
    """Temperature of the contrast, nats per token."""
    margin: float = Field(default=0.5, ge=0)
    """m at the end of the run, nats per token; 0 at its start."""
    positive_at: float = Field(default=0.5, gt=0, le=1)
    """Least reward of a correct answer."""


def credit(inputs: CreditInputs, options: ConspoOptions) -> Credit:
    """Labels: 1 for correct answers, -1 for wrong ones, 0 for a group that has nothing to contrast."""
    positive_G = inputs.rewards_G >= options.positive_at
    mixed = positive_G.any() and not positive_G.all()
    labels_G = torch.where(positive_G, 1.0, -1.0).double() * float(mixed)
    return Credit(credits_G=inputs.rewards_G, advantages_G=labels_G)


def coefficients(scores_G: torch.Tensor, positive_G: torch.Tensor, tau: float, margin: float) -> torch.Tensor:
    """[G] float64 dL / ds of one group from its scores [G] and labels [G] bool; they sum to 0."""
    wrong_J = scores_G[~positive_G] / tau
    right_K = (scores_G[positive_G] - margin) / tau
    logits_KJ = torch.cat([right_K[:, None], wrong_J.expand(len(right_K), -1)], dim=1)
    shares_KJ = logits_KJ.softmax(dim=1)
    result_G = torch.zeros_like(scores_G)
    result_G[positive_G] = -(1 - shares_KJ[:, 0]) / (tau * len(right_K))
    result_G[~positive_G] = shares_KJ[:, 1:].sum(0) / (tau * len(right_K))
    return result_G


def prepare(batch: TokenBatch, stats: TokenStats, options: ConspoOptions, state: State, scope: Scope) -> Prepared:
    """Each row's coefficient as its advantage, times its group's size: a mean over rows is then the mean over groups."""
    scores_N = row_means(stats.logprobs_T.double(), batch)
    labels_N = row_means(batch.advantages_T.double(), batch)
    present_N = trained_tokens(batch) > 0
    margin = options.margin * scope.progress
    advantages_N = torch.zeros_like(scores_N)
    for group in batch.group_N.unique():
        rows = (batch.group_N == group) & present_N
        positive_G = labels_N[rows] > 0
        if positive_G.any() and (labels_N[rows] < 0).any():
            advantages_N[rows] = -int(rows.sum()) * coefficients(scores_N[rows], positive_G, options.tau, margin)
    advantages_T = (on_tokens(advantages_N, batch) * batch.mask_T).float()
    return Prepared(batch=replace(batch, advantages_T=advantages_T), metrics={"conspo_margin": margin})


def policy_loss(
    stats: TokenStats, batch: TokenBatch, options: MethodOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Minus coefficient x log pi."""
    return reinforce(stats.logprobs_T, old_logprobs(stats, batch), batch.advantages_T)


METHOD = Method(
    name="conspo",
    arxiv="2605.12969",
    summary="InfoNCE of an answer's mean log-probability: correct against wrong, with a growing margin",
    evidence="second-hand: score, loss, growing margin; reconstruction: tau, size and line of the margin",
    options=ConspoOptions,
    credit=credit,
    prepare=prepare,
    unit="labels",
    one_update=True,
    shape_rewards=penalized_rewards,
    policy_loss=policy_loss,
)

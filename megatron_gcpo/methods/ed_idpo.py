"""ED-iDPO: iterative DPO on each step's own answers, with an exploration term (arXiv 2605.09853).

Every correct answer i of a group is preferred to every wrong one j. With s = log pi(y) - log ref(y) of a whole answer the
loss of a group is the mean of -log sigmoid(beta (s_i - s_j)) over its pairs; a step draws new answers, which makes it
iterative. alpha E_{y ~ ref}[log pi(y)] is added (methods/exploration.py says how).

Phase one turns it into constants: a pair's gradient is -beta sigmoid(-beta (s_i - s_j)) (grad log pi(y_i) - grad log
pi(y_j)) (derived). Exact for one update a step.

Verified: the abstract only, and DPO's loss. Our reconstruction: pairs from the verifier's labels, and the term.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from megatron_gcpo.loss.rows import on_tokens, row_means, row_sums, trained_tokens
from megatron_gcpo.methods.base import LossOptions, Method, penalized_rewards
from megatron_gcpo.methods.conspo import credit, policy_loss
from megatron_gcpo.methods.ed_grpo import EdGrpoOptions
from megatron_gcpo.methods.exploration import push, truncated_share
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.types import TokenBatch, TokenStats


class EdIdpoLoss(LossOptions):
    reduce: Literal["sequence_mean_token_mean"] = "sequence_mean_token_mean"


class EdIdpoOptions(EdGrpoOptions):
    loss: EdIdpoLoss = EdIdpoLoss()  # type: ignore[assignment]
    beta: float = Field(default=0.1, gt=0)
    """Inverse temperature of the preference, per nat."""
    positive_at: float = Field(default=0.5, gt=0, le=1)
    """Least reward of a correct answer."""


def coefficients(scores_G: torch.Tensor, positive_G: torch.Tensor, beta: float) -> torch.Tensor:
    """[G] float64 d loss / d log pi(y) of one group from its s [G] and labels [G] bool; they sum to 0."""
    right_K, wrong_J = scores_G[positive_G], scores_G[~positive_G]
    pull_KJ = beta * torch.sigmoid(-beta * (right_K[:, None] - wrong_J)) / (len(right_K) * len(wrong_J))
    result_G = torch.zeros_like(scores_G)
    result_G[positive_G] = -pull_KJ.sum(1)
    result_G[~positive_G] = pull_KJ.sum(0)
    return result_G


def prepare(batch: TokenBatch, stats: TokenStats, options: EdIdpoOptions, state: State, scope: Scope) -> Prepared:
    """Each row's coefficient as its advantage, times its length and group size: what the means of the loss divide by."""
    assert batch.ref_logprobs_T is not None, "got no reference log-probs, expected those of the preference"
    lengths_N = trained_tokens(batch)
    present_N = lengths_N > 0
    scores_N = row_sums(stats.logprobs_T.double() - batch.ref_logprobs_T.double(), batch)
    labels_N = row_means(batch.advantages_T.double(), batch)
    push_N = push(batch, stats, options.max_ratio)
    coefficients_N = options.alpha * push_N
    for group in batch.group_N.unique():
        rows = (batch.group_N == group) & present_N
        positive_G = labels_N[rows] > 0
        if positive_G.any() and (labels_N[rows] < 0).any():
            coefficients_N[rows] += int(rows.sum()) * coefficients(scores_N[rows], positive_G, options.beta)
    advantages_T = (on_tokens(-coefficients_N * lengths_N, batch) * batch.mask_T).float()
    share = truncated_share(push_N, batch, options.max_ratio, scope)
    return Prepared(batch=replace(batch, advantages_T=advantages_T), metrics={"exploration_truncated_share": share})


METHOD = Method(
    name="ed_idpo",
    arxiv="2605.09853",
    summary="DPO between the correct and the wrong answers of a step, pushed away from the starting policy",
    evidence="abstract: exploration term on iterative DPO; reconstruction: pairs from group labels, the term",
    options=EdIdpoOptions,
    credit=credit,
    needs=frozenset({"ref_logprobs"}),
    prepare=prepare,
    unit="labels",
    one_update=True,
    shape_rewards=penalized_rewards,
    policy_loss=policy_loss,
)

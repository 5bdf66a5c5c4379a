"""The exploration term of ed_grpo and ed_idpo: alpha x the mean log-likelihood of what the reference policy would say.

Added to a loss that is minimized, alpha E_{y ~ ref}[log pi(y)] takes probability away from the reference policy's
answers: it is 0 where the policy began and pushes on whatever has left it, so it speeds up what rewards start. Answers of
the reference are not drawn; those of the policy are weighed: E_{y ~ pi}[(ref(y) / pi(y) - 1) grad log pi(y)] is the same
gradient, as grad log pi has mean 0 under pi (derived; with policy answers unweighed the term would do nothing in the
mean). The ratio of a whole answer has a heavy tail, so it is truncated, which leaves part of the push out.
"""

from __future__ import annotations

import torch

from megatron_gcpo.loss.rows import row_sums, trained_tokens
from megatron_gcpo.methods.phase import Scope
from megatron_gcpo.types import TokenBatch, TokenStats


def push(batch: TokenBatch, stats: TokenStats, max_ratio: float) -> torch.Tensor:
    """[N] float64 min(ref(y) / pi(y), max_ratio) - 1 of each row; 0 for rows without a trained token.

    stats: of the policy that is about to be updated.
    """
    assert batch.ref_logprobs_T is not None, "got no reference log-probs, expected those of the exploration term"
    gap_N = row_sums(batch.ref_logprobs_T.double() - stats.logprobs_T.double(), batch)
    ratio_N = gap_N.exp().clamp(max=max_ratio)
    return torch.where(trained_tokens(batch) > 0, ratio_N - 1, 0)


def truncated_share(push_N: torch.Tensor, batch: TokenBatch, max_ratio: float, scope: Scope) -> float:
    """Of the rows of all replicas. Collective."""
    share, _ = scope.mean((push_N >= max_ratio - 1).double(), (trained_tokens(batch) > 0).double())
    return share

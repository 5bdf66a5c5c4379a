"""DARLING (arXiv 2509.02534).

Quality and diversity are multiplied, so that neither can stand in for the other. A group's answers are partitioned by
meaning; an answer's diversity is the share of the other answers in other parts; its reward is multiplied by it. The
advantage is the difference to the group's mean, without the std, and the loss is a mean over tokens.

Verified: the product, the share of different answers, no std, token mean. Our reconstruction: the partition. The paper
trains a classifier; here two answers mean the same when the cosine of their embeddings reaches ``threshold``, and parts
are the connected components. All answers count, wrong ones too.
"""

from __future__ import annotations

import torch
from pydantic import Field

from megatron_gcpo.methods.base import Method, MethodOptions, centred, clipped_surrogate, penalized_rewards
from megatron_gcpo.types import Credit, CreditInputs


class DarlingOptions(MethodOptions):
    threshold: float = Field(default=0.9, gt=0, le=1)
    """Least cosine of two answers that mean the same."""


def credit(inputs: CreditInputs, options: DarlingOptions) -> Credit:
    """Reward x share of the other answers that mean something else, less the group's mean."""
    size = len(inputs.rewards_G)
    labels_G = clusters(inputs.embeddings_GD, size, options.threshold)
    different_G = (labels_G[:, None] != labels_G[None]).double().sum(1) / max(size - 1, 1)
    pay_G = inputs.rewards_G * different_G
    return Credit(credits_G=pay_G, advantages_G=centred(pay_G), metrics={"clusters": float(len(labels_G.unique()))})


def clusters(embeddings_GD: torch.Tensor | None, size: int, threshold: float) -> torch.Tensor:
    """[G] int64: the smallest index in each answer's connected component of cosine >= threshold; None: no two alike."""
    labels_G = torch.arange(size)
    if embeddings_GD is None:
        return labels_G
    rows_GD = embeddings_GD.double()
    alike_GG = (rows_GD @ rows_GD.T >= threshold - 1e-6) | torch.eye(size, dtype=torch.bool)
    for _ in range(size):
        labels_G = torch.where(alike_GG, labels_G[None], size).amin(1)
    return labels_G


METHOD = Method(
    name="darling",
    arxiv="2509.02534",
    summary="reward times the share of the group that means something else, less the mean",
    evidence="paper: product, share, no std, token mean; reconstruction: partition by cosine instead of a trained classifier",
    options=DarlingOptions,
    credit=credit,
    needs=frozenset({"all_embeddings"}),
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

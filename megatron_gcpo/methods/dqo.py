"""Diversity Quality Optimization (DQO, arXiv 2509.04784).

The objective of a group is the sum of its rewards plus alpha times the log-determinant of the kernel matrix of its
answers' embeddings: the volume they span, after determinantal point processes. The volume belongs to the group, so each
answer is paid what the group loses without it. Wrong answers count in the volume too, unlike in gcpo.

Verified: log-determinant of embeddings, added to the reward. Our reconstruction: the identity added to the kernel
(ridge 1 with scale c), the leave-one-out difference, and the mean of the group as baseline.
"""

from __future__ import annotations

import torch
from pydantic import Field

from megatron_gcpo.methods.base import Method, MethodOptions, centred, clipped_surrogate, penalized_rewards
from megatron_gcpo.types import Credit, CreditInputs


class DqoOptions(MethodOptions):
    alpha: float = Field(default=0.1, ge=0)
    """Weight of the diversity bonus, rewards per nat of volume."""
    c: float = Field(default=10.0, gt=0)
    """Scale of the kernel c e_i.e_j."""


def credit(inputs: CreditInputs, options: DqoOptions) -> Credit:
    """Reward + alpha x (log det(I + L) - log det(I + L without i)), less the group's mean."""
    bonus_G = marginal_volumes(inputs.embeddings_GD, len(inputs.rewards_G), options.c)
    pay_G = inputs.rewards_G + options.alpha * bonus_G
    return Credit(credits_G=pay_G, advantages_G=centred(pay_G), metrics={"volume_bonus": float(bonus_G.mean())})


def marginal_volumes(embeddings_GD: torch.Tensor | None, size: int, c: float) -> torch.Tensor:
    """[G] float64 nats: -log of the diagonal of (I + L)^-1, which is that difference (Schur complement; derived)."""
    if embeddings_GD is None:
        return torch.zeros(size, dtype=torch.float64)
    rows_GD = embeddings_GD.double()
    kernel_GG = torch.eye(size, dtype=torch.float64) + c * rows_GD @ rows_GD.T
    return -torch.linalg.inv(kernel_GG).diagonal().log()


METHOD = Method(
    name="dqo",
    arxiv="2509.04784",
    summary="reward plus what the group's embedding volume loses without the answer",
    evidence="paper: log-det of embeddings beside the reward; reconstruction: ridge, leave-one-out, baseline",
    options=DqoOptions,
    credit=credit,
    needs=frozenset({"all_embeddings"}),
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

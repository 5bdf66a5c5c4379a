"""REINFORCE++ with a baseline (arXiv 2501.03262).

For several answers to a question the group's mean reward is taken off first, r - mean r, which tells the answers to one
question apart. The scale still comes from the whole step: the differences are normalized by the mean and std over all
its tokens, so that a question with nearly equal answers is not blown up. The KL term goes into the loss, with estimator
k2.

Ours to choose: as in reinforce_pp; the KL term is off until loss.kl_coef is set.
"""

from __future__ import annotations

from typing import Literal

from megatron_gcpo.methods.base import LossOptions, Method, MethodOptions, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.dr_grpo import credit
from megatron_gcpo.methods.reinforce_pp import prepare


class BaselineLoss(LossOptions):
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"


class ReinforcePpBaselineOptions(MethodOptions):
    loss: BaselineLoss = BaselineLoss()


METHOD = Method(
    name="reinforce_pp_baseline",
    arxiv="2501.03262",
    summary="reward less the group's mean, in units of the whole step's spread",
    evidence="paper: baseline, global normalization, k2; ours: token-weighted statistics",
    options=ReinforcePpBaselineOptions,
    credit=credit,
    prepare=prepare,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

"""FG-ExPO (arXiv 2605.11403; its KL part alone: EXPO, arXiv 2605.09923).

Two changes to GRPO with a KL term. The term's weight follows the accuracy of the step, beta (tanh(acc) + 1) / 2, so
that a policy that solves little is freer to explore. Prompts are drawn with Gaussian weights around an estimated
success rate of one half, where groups tell answers apart. Both are verified from the papers, with these defaults: beta
0.02, k3 in the loss, sigma 0.35, estimates with decay 0.9 from 0.5.

Any method can have either: ``loss.kl_controller: expo`` and ``sampler: gaussian``.
"""

from __future__ import annotations

from pydantic import Field

from megatron_gcpo.data.curriculum import GaussianSampling, SamplerOptions
from megatron_gcpo.methods.base import Method, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.grpo import GrpoLoss, GrpoOptions, credit
from megatron_gcpo.methods.kl import ExpoKl, KlController


class FgExpoLoss(GrpoLoss):
    kl_coef: float = Field(default=0.02, ge=0)
    kl_controller: KlController = ExpoKl()


class FgExpoOptions(GrpoOptions):
    loss: FgExpoLoss = FgExpoLoss()
    sampler: SamplerOptions = GaussianSampling()


METHOD = Method(
    name="fg_expo",
    arxiv="2605.11403",
    summary="GRPO with a KL weight that follows accuracy and prompts drawn around half solved",
    evidence="paper: both formulas and their constants",
    options=FgExpoOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

"""GRPO with an entropy bonus (Williams and Peng, 1991; Mnih et al., arXiv 1602.01783).

The oldest remedy against a policy that collapses: the mean entropy of the tokens' distributions is added to the
objective, with a small weight. It needs the true entropy over the vocabulary, which the statistics kernel gives with
its gradient.

``loss.entropy_coef`` does the same for every method; here it is 0.001 (ours).
"""

from __future__ import annotations

from pydantic import Field

from megatron_gcpo.methods.base import Method, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.grpo import GrpoLoss, GrpoOptions, credit


class EntropyBonusLoss(GrpoLoss):
    entropy_coef: float = Field(default=1e-3, ge=0)


class EntropyBonusOptions(GrpoOptions):
    loss: EntropyBonusLoss = EntropyBonusLoss()


METHOD = Method(
    name="entropy_bonus",
    arxiv="1602.01783",
    summary="GRPO plus the mean entropy of the tokens' distributions",
    evidence="paper: the bonus; ours: its weight",
    options=EntropyBonusOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

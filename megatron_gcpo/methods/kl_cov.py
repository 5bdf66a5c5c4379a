"""KL-Cov (arXiv 2505.22617).

As Clip-Cov, but the tokens of highest covariance keep their gradient and are held to the old policy instead: coef x
|log pi - log old| is added to their loss. It acts from the second update of a step on, since the first starts at the
old policy: train.mini_batches must be above 1.

Share and weight are those of the published implementation (methods/token_credit/cuts.py). ``token_credit: [kl_cov]``
gives the same to any method.
"""

from __future__ import annotations

from megatron_gcpo.methods.base import Method, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.grpo import GrpoOptions, credit
from megatron_gcpo.methods.token_credit.cuts import KlCov
from megatron_gcpo.methods.token_credit.table import TokenCreditOptions


class KlCovOptions(GrpoOptions):
    token_credit: tuple[TokenCreditOptions, ...] = (KlCov(),)


METHOD = Method(
    name="kl_cov",
    arxiv="2505.22617",
    summary="GRPO with the highest-covariance tokens held to the old policy",
    evidence="paper and code: share, weight",
    options=KlCovOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

"""Covariance-weighted GRPO (CW-GRPO, arXiv 2605.11538).

The covariance of a token's log-probability with its advantage drives the policy's entropy, and a few tokens at its
tails do most of the driving. CW-GRPO multiplies advantages by a Gaussian kernel of that covariance, w = exp(-c^2 / (2
sigma^2)), scaled to mean 1. There is nothing to tune: sigma is the std of c over the step. The rest is GRPO.

Formula verified second-hand (methods/token_credit/covariance.py); ``token_credit: [cw]`` gives the same to any method
with token advantages.
"""

from __future__ import annotations

from megatron_gcpo.methods.base import Method, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.grpo import GrpoOptions, credit
from megatron_gcpo.methods.token_credit.covariance import CovarianceOptions
from megatron_gcpo.methods.token_credit.table import TokenCreditOptions


class CwGrpoOptions(GrpoOptions):
    token_credit: tuple[TokenCreditOptions, ...] = (CovarianceOptions(),)


METHOD = Method(
    name="cw_grpo",
    arxiv="2605.11538",
    summary="GRPO with tokens of extreme covariance held back by a Gaussian kernel",
    evidence="second-hand: the kernel and its scale",
    options=CwGrpoOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

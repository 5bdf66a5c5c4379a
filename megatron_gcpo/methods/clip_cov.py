"""Clip-Cov (arXiv 2505.22617).

Entropy falls with the covariance of log-probability and advantage, and that covariance is carried by very few tokens.
Clip-Cov takes the gradient from a small random share of the tokens whose covariance is high. Everything else is GRPO.

Band and share are those of the published implementation; how the tokens are drawn is ours
(methods/token_credit/cuts.py). ``token_credit: [clip_cov]`` gives the same to any method with token advantages.
"""

from __future__ import annotations

from megatron_gcpo.methods.base import Method, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.grpo import GrpoOptions, credit
from megatron_gcpo.methods.token_credit.cuts import ClipCov
from megatron_gcpo.methods.token_credit.table import TokenCreditOptions


class ClipCovOptions(GrpoOptions):
    token_credit: tuple[TokenCreditOptions, ...] = (ClipCov(),)


METHOD = Method(
    name="clip_cov",
    arxiv="2505.22617",
    summary="GRPO without the gradient of a few high-covariance tokens",
    evidence="paper and code: band, share; ours: draws that no layout changes",
    options=ClipCovOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

"""Token credit: from one advantage for a rollout to one for each token. Parts are chained in the order they are named."""

from megatron_gcpo.methods.token_credit.covariance import CovarianceOptions
from megatron_gcpo.methods.token_credit.cuts import ClipCov, KlCov
from megatron_gcpo.methods.token_credit.flow import FlowOptions
from megatron_gcpo.methods.token_credit.polarity import PolarityOptions
from megatron_gcpo.methods.token_credit.table import TOKEN_CREDITS, TokenCredit, TokenCreditOptions

__all__ = [
    "TOKEN_CREDITS",
    "ClipCov",
    "CovarianceOptions",
    "FlowOptions",
    "KlCov",
    "PolarityOptions",
    "TokenCredit",
    "TokenCreditOptions",
]

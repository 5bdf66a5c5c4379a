"""Entropy polarity policy optimization (PAPO, arXiv 2605.11775).

Whether a token's update widens or narrows the policy's distribution is the sign of its advantage times a term of the
distribution alone. PAPO keeps both kinds in the update and shifts weight between them with the state of the entropy:
towards widening tokens when it has fallen, towards narrowing ones when it has risen. The base is DAPO.

The polarity is derived; the rule that sets the weights is our reconstruction (methods/token_credit/polarity.py).
``token_credit: [papo]`` gives the same to any method with token advantages.
"""

from __future__ import annotations

from megatron_gcpo.methods.base import Method, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.dapo import DapoOptions
from megatron_gcpo.methods.grpo import credit
from megatron_gcpo.methods.token_credit.polarity import PolarityOptions
from megatron_gcpo.methods.token_credit.table import TokenCreditOptions


class PapoOptions(DapoOptions):
    token_credit: tuple[TokenCreditOptions, ...] = (PolarityOptions(),)


METHOD = Method(
    name="papo",
    arxiv="2605.11775",
    summary="token weights by whether they widen or narrow the distribution, steered by the entropy",
    evidence="derived: polarity; reconstruction: the rule of the weights",
    options=PapoOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

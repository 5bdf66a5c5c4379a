"""OPEFO (arXiv 2605.11491).

Each token's update raises or lowers the entropy of its distribution by an amount that is known to first order. OPEFO
weighs the raising tokens by 1 + lambda and the lowering ones by 1 - lambda so that the predicted flow is 0. It wants to
be strictly on policy: one update for each batch. Advantages are not divided by the group's std.

lambda is verified second-hand; the form of a token's flow is our reconstruction, an option
(methods/token_credit/flow.py). ``token_credit: [opefo]`` gives the same to any method with token advantages.
"""

from __future__ import annotations

from megatron_gcpo.methods.base import Method, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.dr_grpo import DrGrpoOptions, credit
from megatron_gcpo.methods.token_credit.flow import FlowOptions
from megatron_gcpo.methods.token_credit.table import TokenCreditOptions


class OpefoOptions(DrGrpoOptions):
    token_credit: tuple[TokenCreditOptions, ...] = (FlowOptions(),)


METHOD = Method(
    name="opefo",
    arxiv="2605.11491",
    summary="token weights that make the predicted change of the entropy zero",
    evidence="second-hand: lambda, no std; reconstruction: form of the flow (dh)",
    options=OpefoOptions,
    credit=credit,
    one_update=True,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

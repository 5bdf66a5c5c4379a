"""Pure maths of the cooperative game: coalitions' values, Shapley values, advantages."""

from megatron_gcpo.credit.advantage import advantages_from_credits, gcpo_advantages
from megatron_gcpo.credit.coalition import log_volume_lattice, team_value
from megatron_gcpo.credit.options import CreditOptions
from megatron_gcpo.credit.shapley import TeamCredit, divide, shapley_values, team_credit
from megatron_gcpo.credit.team import Team, build_team

__all__ = [
    "CreditOptions",
    "Team",
    "TeamCredit",
    "advantages_from_credits",
    "build_team",
    "divide",
    "gcpo_advantages",
    "log_volume_lattice",
    "shapley_values",
    "team_credit",
    "team_value",
]

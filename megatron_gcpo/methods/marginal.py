"""Leave-one-out marginals of the team value (ours; the plainest rival of gcpo's Shapley value).

The team of correct answers is worth log det(I + L), as in gcpo, and each is paid what the team loses without it. That
is one determinant for each answer instead of all coalitions. But copies are paid almost nothing together: with the
other one there, neither is missed, whereas the Shapley value shares one payment between them.

Normalization, filter and loss are gcpo's, so that the two differ by this alone.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_gcpo.credit.advantage import advantages_from_credits
from megatron_gcpo.credit.coalition import log_volumes, volumes_from_logs
from megatron_gcpo.credit.team import build_team
from megatron_gcpo.methods.base import Method, clipped_surrogate, rewards_in_range
from megatron_gcpo.methods.gcpo import GcpoOptions
from megatron_gcpo.types import Credit, CreditInputs


def credit(inputs: CreditInputs, options: GcpoOptions) -> Credit:
    """v(all) - v(all but i), 0 for wrong answers, in gcpo's normalization. Metrics: team_value, shared_value.

    shared_value is what nobody is paid: the team's value less the sum of the credits.
    """
    chosen = options.credit_options()
    team = build_team(inputs.embeddings_GD, inputs.rewards_G, chosen)
    k = len(team.members_K)
    values = log_volumes(team.kernel_KK, np.vstack([np.ones((1, k)), 1 - np.eye(k)]))
    if chosen.value == "det":
        values = volumes_from_logs(values)
    credits_G = np.zeros(len(team.rewards_G))
    credits_G[team.members_K] = values[0] - values[1:]
    return Credit(
        credits_G=torch.from_numpy(credits_G),
        advantages_G=torch.from_numpy(advantages_from_credits(credits_G, team.rewards_G, chosen)),
        metrics={"team_value": float(values[0]), "shared_value": float(values[0] - credits_G.sum())},
    )


METHOD = Method(
    name="marginal",
    arxiv="",
    summary="what the volume of the correct answers loses without the answer",
    evidence="ours, for comparison with gcpo",
    options=GcpoOptions,
    credit=credit,
    needs=frozenset({"embeddings"}),
    shape_rewards=rewards_in_range,
    policy_loss=clipped_surrogate,
)

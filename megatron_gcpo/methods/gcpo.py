"""Group Cooperative Policy Optimization (GCPO, arXiv 2605.11461).

The answers to one question are a team, not competitors. The team's value is the volume spanned by the reward-weighted
semantic embeddings of its answers, so only answers that are correct and different from the others add to it. Each
answer is paid its average marginal contribution to that volume in place of its own reward. Correct but redundant
answers share one payment, which keeps the policy from collapsing onto a single way of solving.

Our reconstruction, since formulas and code are not public: the volume is log det(I + L) of the kernel L_ij = c sqrt(r_i
r_j) e_i.e_j; the average marginal contribution is the Shapley value; the advantage is (phi - mean phi) / (population
std phi + 0.05 log(1 + c)); every choice is an option below. ``normalize: split`` (credit.advantage) keeps the accuracy
of GRPO where the plain form loses some, and is what configs/method/gcpo.yaml trains with. The token loss is ours too:
PPO's clipped surrogate with a mean over all tokens, and groups without signal are dropped. A reward scales a rollout's
volume, so the overlong penalty stops at 0: a wrong rollout is a null player whatever its length.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, NonNegativeInt, model_validator

from megatron_gcpo.credit.advantage import advantages_from_credits
from megatron_gcpo.credit.options import CREDIT_FIELDS, MAX_EXACT_LIMIT, CreditOptions, Normalize, RewardMap, Value
from megatron_gcpo.credit.shapley import divide
from megatron_gcpo.credit.team import Team, build_team
from megatron_gcpo.methods.base import Method, MethodOptions, clipped_surrogate, rewards_in_range
from megatron_gcpo.types import Credit, CreditInputs


class GcpoOptions(MethodOptions):
    """Every choice of the reconstruction; credit.options says what each one means."""

    group_filter: bool = True
    value: Value = CreditOptions.value
    """Team value: logdet | det."""
    c: float = CreditOptions.c
    """Scale of the kernel."""
    reward_map: RewardMap = CreditOptions.reward_map
    """Weight of a reward: sqrt | identity | binary."""
    normalize: Normalize = CreditOptions.normalize
    """Advantages from credits: std | split | mean | none."""
    floor: float | None = CreditOptions.floor
    """Added to the std; None: 0.05 log(1 + c)."""
    credit_mix: float = CreditOptions.credit_mix
    """Share of the plain reward in the credit; 0: pure cooperation."""
    cooperation: float = CreditOptions.cooperation
    """split only: weight of what is redistributed among correct rollouts."""
    exact_limit: int = Field(default=CreditOptions.exact_limit, ge=0, le=MAX_EXACT_LIMIT)
    """Most rewarded rollouts whose coalitions are enumerated; beyond it permutations are sampled."""
    num_permutations: int = CreditOptions.num_permutations
    """Permutations sampled beyond exact_limit, counting reverses."""
    seed: NonNegativeInt = CreditOptions.seed
    """Seed of the sampled permutations."""

    @model_validator(mode="after")
    def _check_credit_options(self) -> GcpoOptions:
        self.credit_options()
        return self

    def credit_options(self) -> CreditOptions:
        chosen: dict[str, Any] = {name: getattr(self, name) for name in CREDIT_FIELDS}
        return CreditOptions(**chosen)


def credit(inputs: CreditInputs, options: GcpoOptions) -> Credit:
    """Shapley values of the team and their normalized form.

    Metrics: team_value; shapley_stderr (largest over the rollouts) and sampled_share (1 when permutations were
    sampled); correct_cosine, the mean pairwise cosine of rewarded rollouts, only for groups with at least two of
    them.
    """
    chosen = options.credit_options()
    team = build_team(inputs.embeddings_GD, inputs.rewards_G, chosen)
    paid = divide(team, chosen)
    metrics = {
        "team_value": paid.team_value,
        "shapley_stderr": float(paid.stderr_G.max()),
        "sampled_share": float(paid.sampled),
        **_cosine_metric(team),
    }
    return Credit(
        credits_G=torch.from_numpy(paid.credits_G),
        advantages_G=torch.from_numpy(advantages_from_credits(paid.credits_G, team.rewards_G, chosen)),
        metrics=metrics,
    )


def _cosine_metric(team: Team) -> dict[str, float]:
    k = len(team.members_K)
    if k < 2:
        return {}
    return {"correct_cosine": float((team.cosines_KK.sum() - team.cosines_KK.trace()) / (k * (k - 1)))}


METHOD = Method(
    name="gcpo",
    arxiv="2605.11461",
    summary="Shapley value of the volume that the group's correct answers span together",
    evidence="abstract: the volume, average marginal contribution; every formula is our reconstruction",
    options=GcpoOptions,
    credit=credit,
    needs=frozenset({"embeddings"}),
    shape_rewards=rewards_in_range,
    policy_loss=clipped_surrogate,
)

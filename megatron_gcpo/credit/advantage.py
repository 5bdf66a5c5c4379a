"""From credits to advantages: what multiplies each rollout's policy gradient."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_gcpo.credit.options import CreditOptions, credit_options
from megatron_gcpo.credit.shapley import divide
from megatron_gcpo.credit.team import Array, build_team, same_kind

ROUNDING = 1e-10
"""Relative spread that is rounding, not signal: equal players must not be told apart when the floor is 0."""


def gcpo_advantages(embeddings_GD: Array | None, rewards_G: Array, **options: Any) -> Array:
    """[G] float64: the advantages of Group Cooperative Policy Optimization (our reconstruction of arXiv 2605.11461).

    With phi the Shapley values and y = (1 - credit_mix) phi + credit_mix r, the default ``normalize="std"`` is A = (y
    - mean y) / (std y + floor), population std, floor 0.05 log(1 + c). Inputs as in ``team.build_team``; a tensor
    comes back if one came in. Options: ``CreditOptions``. Errors: ValueError on bad input and for a group of one.
    """
    chosen = credit_options(options)
    team = build_team(embeddings_GD, rewards_G, chosen)
    credits_G = divide(team, chosen).credits_G
    return same_kind(advantages_from_credits(credits_G, team.rewards_G, chosen), embeddings_GD, rewards_G)


def advantages_from_credits(credits_G: np.ndarray, rewards_G: np.ndarray, options: CreditOptions) -> np.ndarray:
    """[G] float64 advantages of credits that are already known (``gcpo_advantages`` computes them)."""
    if len(credits_G) < 2:
        raise ValueError("a group of one rollout has no baseline to compare with: set rollout.group_size to 2 or more")
    if options.normalize == "split":
        return split_advantages(credits_G, rewards_G, options)
    pay_G = (1 - options.credit_mix) * credits_G + options.credit_mix * rewards_G
    if options.normalize == "none":
        return pay_G
    centred_G = pay_G - pay_G.mean()
    if options.normalize == "mean":
        return centred_G
    spread = np.sqrt((centred_G**2).mean())
    if spread <= ROUNDING * np.abs(pay_G).max():
        return np.zeros_like(centred_G)
    return centred_G / (spread + options.std_floor)


def split_advantages(credits_G: np.ndarray, rewards_G: np.ndarray, options: CreditOptions) -> np.ndarray:
    """[G] float64: GRPO's advantage plus what the team redistributes among its rewarded rollouts (ours; derived).

    phi_i = r_i sum phi / sum r + delta_i: what rollout i would get if the team's value were shared by accuracy alone, and
    what it gets for being different (positive) or redundant (negative). The first part is proportional to the reward, so
    its standardized form is GRPO's advantage. The deltas sum to 0 and vanish for wrong rollouts and for a lone correct
    one; they are measured in values of one correct rollout. Hence

        A_i = (r_i - mean r) / (std r + 1e-4) + cooperation delta_i / v({one correct}).

    With ``std`` the two parts share one denominator: the more redundant a group, the more the second part drowns the
    first, until a correct rollout of a large cluster is pushed down almost like a wrong one.
    """
    spread = rewards_G.std()
    accuracy_G = (rewards_G - rewards_G.mean()) / (spread + 1e-4)
    total = rewards_G.sum()
    if total == 0:
        return accuracy_G
    delta_G = credits_G - rewards_G * credits_G.sum() / total
    return accuracy_G + options.cooperation * delta_G / options.lone_value

"""Every choice of the cooperative credit, checked in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from megatron_gcpo.names import nearest

MAX_EXACT_LIMIT = 24
"""Exact Shapley values need about 32 bytes x 2^K: 32 MiB at K = 20, 512 MiB at K = 24."""
MAX_C = 1e8

Value = Literal["logdet", "det"]
RewardMap = Literal["sqrt", "identity", "binary"]
Normalize = Literal["std", "split", "mean", "none"]
CHOICES = {"value": get_args(Value), "reward_map": get_args(RewardMap), "normalize": get_args(Normalize)}


@dataclass(frozen=True, kw_only=True)
class CreditOptions:
    """One set of options for team_value, shapley_values and gcpo_advantages; each reads the ones that concern it.

    The game is ours to reconstruct: the abstract of arXiv 2605.11461 names a determinant volume over reward-weighted
    semantic embeddings and average marginal contributions, not the formula.
    """

    value: Value = "logdet"
    """logdet: v(S) = log det(I + L_S).  det: v(S) = det(I + L_S) - 1."""
    c: float = 10.0
    """Scale of the kernel L_ij = c w(r_i) w(r_j) e_i.e_j: how much a first correct solution outweighs its copies."""
    reward_map: RewardMap = "sqrt"
    """w(r): sqrt(r), so that c r_i is the squared length of rollout i;  r;  or 1 for every non-zero reward."""
    normalize: Normalize = "std"
    """std: (credit - mean) / (population std + floor).  split: accuracy and cooperation apart, each on its own scale
    (``advantage.split_advantages``).  mean: credit - mean.  none: credit."""
    floor: float | None = None
    """Added to the std so that a team of near-identical answers is not blown up into noise; None: 0.05 log(1 + c)."""
    credit_mix: float = 0.0
    """Share of the plain reward in what is normalized; 0: pure cooperation. Not for split, which has its own."""
    cooperation: float = 1.0
    """split only: weight of the redistribution among correct rollouts; 0: GRPO."""
    exact_limit: int = 20
    """Most non-null rollouts whose 2^K coalitions are enumerated; beyond it permutations are sampled (logdet only)."""
    num_permutations: int = 512
    """Permutations sampled beyond exact_limit, counting each one's reverse."""
    seed: int = 0
    """Seed of the sampled permutations."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            _require(getattr(self, name) in choices, name, getattr(self, name), f"one of {', '.join(choices)}")
        _require(
            _is_number(self.c) and 0 < self.c <= MAX_C,
            "c",
            self.c,
            f"a number within (0, {MAX_C:g}] (beyond it float64 loses the identity in I + L)",
        )
        _require(
            self.floor is None or (_is_number(self.floor) and self.floor >= 0),
            "floor",
            self.floor,
            "a finite number of at least 0, or None for 0.05 log(1 + c)",
        )
        _require(
            _is_number(self.credit_mix) and 0 <= self.credit_mix <= 1, "credit_mix", self.credit_mix, "within [0, 1]"
        )
        _require(
            _is_number(self.cooperation) and self.cooperation >= 0,
            "cooperation",
            self.cooperation,
            "a finite number of at least 0",
        )
        _require(
            _is_integer(self.exact_limit) and 0 <= self.exact_limit <= MAX_EXACT_LIMIT,
            "exact_limit",
            self.exact_limit,
            f"an integer within [0, {MAX_EXACT_LIMIT}] (memory doubles with every rollout: 512 MiB at 24)",
        )
        _require(
            _is_integer(self.num_permutations) and self.num_permutations >= 4 and self.num_permutations % 2 == 0,
            "num_permutations",
            self.num_permutations,
            "an even integer of at least 4 (permutations come with their reverses, an error needs two pairs)",
        )
        _require(_is_integer(self.seed) and self.seed >= 0, "seed", self.seed, "an integer of at least 0")

    @property
    def lone_value(self) -> float:
        """Value of one rollout with reward 1 alone: the unit of the game."""
        return math.log1p(self.c) if self.value == "logdet" else self.c

    @property
    def std_floor(self) -> float:
        """The floor in force."""
        return 0.05 * math.log1p(self.c) if self.floor is None else self.floor


CREDIT_FIELDS = tuple(f.name for f in fields(CreditOptions))


def credit_options(options: Mapping[str, Any]) -> CreditOptions:
    """Keyword options as a checked record. Errors: ValueError naming the nearest valid option."""
    for name in options:
        if name not in CREDIT_FIELDS:
            near = nearest(name, CREDIT_FIELDS, cutoff=0.0)
            raise ValueError(
                f"credit option {name!r} is unknown; did you mean {near!r}? Valid: {', '.join(CREDIT_FIELDS)}"
            )
    return CreditOptions(**options)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, name: str, got: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"credit option {name} = {got!r} is not usable: set it to {expected}")

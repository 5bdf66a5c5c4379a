"""What a reward is, declared beside every verifier: so that whoever trains on it knows what can go wrong (arXiv 2602.09305)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RewardLabel:
    """The place of a reward in the usual taxonomy, its range, and how it is known to be fooled."""

    paradigm: Literal["rule", "model", "self"]
    """Who judges: a rule, another model, or the policy itself."""
    granularity: Literal["outcome", "process", "set"]
    """What is judged: the result, its steps, or several answers together."""
    verifiable: bool
    """Whether a full reward means that the task is solved."""
    low: float = 0.0
    high: float = 1.0
    exploits: tuple[str, ...] = ()
    """What earns reward without solving the task, one line each."""

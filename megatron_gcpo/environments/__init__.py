"""Conversations: what is said to the policy between its turns, and rollouts that hold all of them."""

from megatron_gcpo.environments.base import Environment, longest_sequence
from megatron_gcpo.environments.critic import CRITIC
from megatron_gcpo.environments.play import Frame, checked_frame, converse, play
from megatron_gcpo.environments.steps import judge_steps
from megatron_gcpo.environments.verdicts import score, turns_of

ENVIRONMENTS = {environment.name: environment for environment in (CRITIC,)}
"""By the name that configurations give them."""

__all__ = [
    "CRITIC",
    "ENVIRONMENTS",
    "Environment",
    "Frame",
    "checked_frame",
    "converse",
    "judge_steps",
    "longest_sequence",
    "play",
    "score",
    "turns_of",
]

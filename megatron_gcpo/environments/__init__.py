"""Conversations: what is said to the policy between its turns, and rollouts that hold all of them."""

from megatron_gcpo.environments.base import Environment
from megatron_gcpo.environments.critic import CRITIC
from megatron_gcpo.environments.play import play
from megatron_gcpo.environments.steps import judge_steps
from megatron_gcpo.environments.verdicts import score, turns_of

__all__ = ["CRITIC", "Environment", "judge_steps", "play", "score", "turns_of"]

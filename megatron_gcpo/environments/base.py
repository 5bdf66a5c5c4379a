"""What an environment is: a frozen record that maps a prompt and what was said so far to the next user's turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_gcpo.types import Prompt

type Reply = Callable[[Prompt, Sequence[str], int], str]
"""(prompt, the policy's turns so far, seed in [0, 2^63)) -> the text of the user's next turn. Pure; sees no reward."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A conversation of a fixed number of turns. The policy's tokens are trained, the user's never."""

    name: str
    num_turns: int
    """Of the policy, at least 2."""
    reply: Reply
    max_reply_tokens: int = 256
    """Most tokens of a user's turn with what the chat template puts around it."""

    def longest(self, max_prompt_tokens: int, max_new_tokens: int) -> int:
        """Most tokens that a conversation can have."""
        return max_prompt_tokens + self.num_turns * max_new_tokens + (self.num_turns - 1) * self.max_reply_tokens


def longest_sequence(environment: Environment | None, max_prompt_tokens: int, max_new_tokens: int) -> int:
    """Most tokens of a prompt with all turns of its conversation; None: with its one answer."""
    if environment is None:
        return max_prompt_tokens + max_new_tokens
    return environment.longest(max_prompt_tokens, max_new_tokens)

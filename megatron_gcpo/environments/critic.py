"""A critic who answers the policy's first answer and asks for a second one, whatever the first was worth.

The critic doubts, agrees or only asks to check, each in one of several wordings. Attitude and wording depend on the
prompt and the step, never on the answer: else the policy could read from the critic whether it was right. All rollouts of
a group meet the same critic, so that their baseline compares like with like. (The wordings are ours.)
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gcpo.environments.base import Environment
from megatron_gcpo.types import Prompt

ATTITUDES: dict[str, tuple[str, ...]] = {
    "doubt": (
        "I think that this is wrong. Look at your solution again and give your final answer.",
        "Are you sure? I arrived at something else. Please reconsider and state the final answer.",
        "There seems to be a mistake in your reasoning. Find it if there is one, then answer again.",
    ),
    "neutral": (
        "Please check your solution step by step and give your final answer.",
        "Go through it once more, with another method if you can, and state the final answer.",
        "Verify each step before you commit yourself. What is your final answer?",
    ),
    "agreement": (
        "That looks right to me. Please confirm and state your final answer once more.",
        "I agree with this. Repeat your final answer, or correct it if you see a reason to.",
        "Good. Before we go on: what is your final answer?",
    ),
}
_MESSAGES = tuple(message for messages in ATTITUDES.values() for message in messages)


def reply(prompt: Prompt, said: Sequence[str], seed: int) -> str:
    return _MESSAGES[seed % len(_MESSAGES)]


CRITIC = Environment(name="critic", num_turns=2, reply=reply)

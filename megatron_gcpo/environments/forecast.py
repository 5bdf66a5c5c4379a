"""How the policy is asked what a prompt will teach it, and how its answer is read. (The wordings are ours.)"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_gcpo.data.judged import MAX_VARIANCE
from megatron_gcpo.verify.verifiers.extract import last_boxed

FRAME_TOKENS = 320
"""Most tokens of a question apart from the problems in it, with what the chat template puts around it."""
_TASK = (
    "You will try to solve a problem several times, and every attempt earns a reward from 0 to 1. Forecast the variance of "
    "these rewards. It is 0 when all attempts end alike, because the problem is far too easy or far too hard for you now, "
    "and 0.25 when half of them succeed."
)
_ASKED = (
    "Think about it in one or two sentences, do not solve the problem, and end with your forecast, a number from 0 to 0.25, "
    "as \\boxed{number}."
)
_NUMBER = re.compile(r"\s*\$?\s*(\d{1,3}(?:\.\d{0,12})?|\.\d{1,12})\s*\$?\s*")


def question(problem: str, recent: Sequence[tuple[str, float]]) -> str:
    """What the policy is asked about a problem. recent: (problem, variance) of the last outcomes, the oldest first."""
    shown = [f"Problem: {text}\nVariance: {variance:.4f}" for text, variance in recent]
    heading = ["Your last outcomes:"] if shown else []
    return "\n\n".join([_TASK, *heading, *shown, f"The problem to judge: {problem}", _ASKED])


def read(text: str) -> float | None:
    """The forecast in the last box of an answer; None when there is no number from 0 to 0.25. Total."""
    boxed = last_boxed(text)
    found = _NUMBER.fullmatch(boxed) if boxed is not None else None
    value = float(found.group(1)) if found else None
    return value if value is not None and value <= MAX_VARIANCE else None

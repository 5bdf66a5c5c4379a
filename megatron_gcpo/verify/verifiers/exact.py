"""The final answer equals the reference as normalised text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_gcpo.verify.base import Sample, Verifier
from megatron_gcpo.verify.verifiers.extract import by_pattern, final_answer, normalise


@dataclass(frozen=True, kw_only=True)
class Exact(Verifier):
    """1 for the right text, else 0."""

    pattern: str | None = None
    """Regular expression of the answer (last match, first group). Default: <answer> tags, \\boxed, "answer is"."""
    whole: bool = False
    """Compare the whole completion when no final answer is found (or ``pattern`` is not set)."""
    case_sensitive: bool = False

    def __post_init__(self) -> None:
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from None

    def judge(self, sample: Sample) -> float:
        text = sample.completion
        found = final_answer(text) if self.pattern is None else by_pattern(self.pattern, text)
        if found is None and self.whole:
            found = text
        if found is None:
            return 0.0
        if self.case_sensitive:
            return float(" ".join(found.split()) == " ".join(sample.answer.split()))
        return float(normalise(found) == normalise(sample.answer))

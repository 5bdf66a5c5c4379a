"""Mathematical equality of the final answer and the reference, by the math-verify package (on SymPy).

Its own time limits are signals that only interrupt Python code, so they are off; the pool's deadline stops everything.
SymPy evaluates strings in places: samples are judged in throw-away processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_gcpo.verify.base import Rejected, Sample, Verifier
from megatron_gcpo.verify.verifiers.extract import last_boxed, last_tagged

_MATH_MARKS = ("$", "\\boxed", "\\(", "\\[")


@dataclass(frozen=True, kw_only=True)
class Math(Verifier):
    """1 when the answers are equal, else 0. Reads boxed answers first, then LaTeX, then plain numbers."""

    float_rounding: int = 6
    """Decimal places to which floats are compared."""
    strict: bool = True
    """Variable names matter, and sets differ from tuples."""
    max_characters: int = 20_000
    """How much of the end of a completion is searched when its answer is neither tagged nor boxed."""

    warm: ClassVar[tuple[Sample, ...]] = tuple(
        Sample("", gold, {}, f"Thus \\boxed{{{said}}}.")
        for gold, said in (
            ("1/2", "0.5"),
            (r"\sqrt{3}", r"3^{1/2}"),
            (r"$(1, 2] \cup \{5\}$", r"(1,2] \cup \{5\}"),
            (r"$x^2 + 2x + 1$", r"(x+1)^2"),
            (r"$\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
            (r"$x > 3$", "3 < x"),
            (r"$\int_0^1 x\,dx$", r"\frac12"),
            (r"$\sum_{k=1}^{3} k$", "6"),
            (r"$\lim_{x \to 0} \frac{\sin x}{x}$", "1"),
            (r"$\frac{d}{dx} x^2$", "2x"),
            (r"$\log_2 8 + e^{i\pi} + \binom{4}{2} + 5!$", "128"),
            ("50\\%", "0.5"),
            ("no number", r"\text{nothing}"),
        )
    )

    def __post_init__(self) -> None:
        if self.float_rounding < 0 or self.max_characters < 1:
            raise ValueError(
                f"float_rounding {self.float_rounding} must be >= 0, max_characters {self.max_characters} >= 1"
            )

    def judge(self, sample: Sample) -> float:
        import math_verify

        text = sample.completion
        found = last_tagged(text) or last_boxed(text)
        said = text[-self.max_characters :] if found is None else _anchored(found)
        reference = math_verify.parse(_anchored(sample.answer), parsing_timeout=0)
        if not reference:
            raise Rejected(f"the reference answer {sample.answer[:60]!r} cannot be read")
        return float(
            math_verify.verify(
                reference,
                math_verify.parse(said, parsing_timeout=0),
                float_rounding=self.float_rounding,
                strict=self.strict,
                timeout_seconds=None,
            )
        )


def _anchored(answer: str) -> str:
    """An answer as the parser recognises it whole: 2\\sqrt{3} by itself would be read as 2."""
    return answer if any(mark in answer for mark in _MATH_MARKS) else f"\\boxed{{{answer}}}"

"""A two-digit times a one-digit number, worked by one of four differently worded methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from megatron_gcpo.data.tasks.base import Problem, Task, final_number, spell, words


@dataclass(frozen=True, kw_only=True)
class Multiplication(Task):
    """a times b, a no multiple of ten; the verifier reads only the final answer."""

    low: int = 11
    """Smallest two-digit factor."""
    high: int = 49
    """Largest two-digit factor, at most 99."""
    multiplier_low: int = 3
    """Smallest one-digit factor, at least 2."""
    multiplier_high: int = 9
    """Largest one-digit factor."""

    name: ClassVar[str] = "multiplication"
    vocabulary: ClassVar[tuple[str, ...]] = words(
        "+ - * x = ? : ; , .",
        "what is times split the number into tens and units sum answer round up to correct later but that too",
        "much by take away keep adding again use doubling only combine none",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 11 <= self.low <= self.high <= 99:
            raise ValueError(f"task multiplication: low {self.low}, high {self.high}: need 11 <= low <= high <= 99")
        if not 2 <= self.multiplier_low <= self.multiplier_high <= 9:
            raise ValueError(
                f"task multiplication: multiplier_low {self.multiplier_low}, multiplier_high {self.multiplier_high}: "
                "need 2 <= multiplier_low <= multiplier_high <= 9"
            )

    @property
    def strategies(self) -> tuple[str, ...]:
        return tuple(_METHODS)

    def problems(self) -> tuple[Problem, ...]:
        return tuple(
            (a, b)
            for a in range(self.low, self.high + 1)
            if a % 10
            for b in range(self.multiplier_low, self.multiplier_high + 1)
        )

    def problem_id(self, problem: Problem) -> str:
        a, b = problem
        return f"multiplication-{a}x{b}"

    def answer(self, problem: Problem) -> str:
        a, b = problem
        return str(a * b)

    @staticmethod
    def verify(answer: str, text: str) -> bool:
        return final_number(text) == int(answer)

    @staticmethod
    def strategy(text: str) -> str:
        first = text.split(maxsplit=1)[0].lower() if text.strip() else ""
        return _FIRST_WORDS.get(first, "none")

    def words_prompt(self, problem: Problem) -> str:
        a, b = problem
        return f"what is {spell(a)} times {b} ?"

    def natural_prompt(self, problem: Problem) -> str:
        a, b = problem
        return f'What is {a} times {b}? Show how you get there and end with the word "answer" and the number.'

    def solutions(self, problem: Problem) -> tuple[tuple[str, str], ...]:
        a, b = problem
        return tuple((name, f"{method(a, b)} answer {spell(a * b)}") for name, method in _METHODS.items())


def _split(a: int, b: int) -> str:
    units = a % 10
    tens = a - units
    return (
        f"split the number into tens and units : {spell(tens)} * {b} = {spell(tens * b)} and {units} * {b} = "
        f"{spell(units * b)} . the sum is {spell(tens * b)} + {spell(units * b)} = {spell(a * b)} ."
    )


def _round(a: int, b: int) -> str:
    excess = 10 - a % 10
    rounded = a + excess
    return (
        f"round up to {spell(rounded)} and correct later : {spell(rounded)} * {b} = {spell(rounded * b)} but that is "
        f"too much by {excess} * {b} = {spell(excess * b)} . take away {spell(rounded * b)} - {spell(excess * b)} = "
        f"{spell(a * b)} ."
    )


def _repeat(a: int, b: int) -> str:
    sums = " , ".join(spell(a * count) for count in range(1, b + 1))
    return f"keep adding the number again and again : {sums} ."


def _double(a: int, b: int) -> str:
    powers = [2**k for k in range(b.bit_length())]
    chain = " , ".join(f"{power} x {spell(power * a)}" for power in powers)
    used = [power for power in reversed(powers) if power & b]
    total, steps = used[0] * a, []
    for power in used[1:]:
        steps.append(f"{spell(total)} + {spell(power * a)} = {spell(total + power * a)} ;")
        total += power * a
    return f"use doubling only : {chain} . combine {' '.join(steps) or 'none ;'}"


_METHODS: dict[str, Callable[[int, int], str]] = {
    "split": _split,
    "round": _round,
    "repeat": _repeat,
    "double": _double,
}
_FIRST_WORDS = {"split": "split", "round": "round", "keep": "repeat", "use": "double"}

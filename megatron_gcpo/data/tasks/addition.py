"""Addition of two-digit numbers, worked by one of five textbook methods of mental arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from megatron_gcpo.data.tasks.base import Problem, Task, final_number, spell, words


@dataclass(frozen=True, kw_only=True)
class Addition(Task):
    """a + b, neither a multiple of ten; the verifier reads only the final answer."""

    low: int = 11
    """Smallest summand."""
    high: int = 89
    """Largest summand, at most 99."""

    name: ClassVar[str] = "addition"
    vocabulary: ClassVar[tuple[str, ...]] = words(
        "+ - = ? : , .",
        "what is split both into tens and ones together answer round the second number up to that too many so",
        "count in jumps of ten then more makes write them columns right keep carry left move from one other now",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 11 <= self.low <= self.high <= 99:
            raise ValueError(f"task addition: low {self.low}, high {self.high} must satisfy 11 <= low <= high <= 99")

    @property
    def strategies(self) -> tuple[str, ...]:
        return tuple(_METHODS)

    def problems(self) -> tuple[Problem, ...]:
        summands = [n for n in range(self.low, self.high + 1) if n % 10]
        return tuple((a, b) for a in summands for b in summands)

    def problem_id(self, problem: Problem) -> str:
        a, b = problem
        return f"addition-{a}+{b}"

    def answer(self, problem: Problem) -> str:
        return str(sum(problem))

    @staticmethod
    def verify(answer: str, text: str) -> bool:
        return final_number(text) == int(answer)

    @staticmethod
    def strategy(text: str) -> str:
        first = text.split(maxsplit=1)[0].lower() if text.strip() else ""
        return first if first in _METHODS else "none"

    def words_prompt(self, problem: Problem) -> str:
        a, b = problem
        return f"what is {spell(a)} + {spell(b)} ?"

    def natural_prompt(self, problem: Problem) -> str:
        a, b = problem
        return f'What is {a} + {b}? Show how you get there and end with the word "answer" and the number.'

    def solutions(self, problem: Problem) -> tuple[tuple[str, str], ...]:
        a, b = problem
        return tuple((name, f"{method(a, b)} . answer {spell(a + b)}") for name, method in _METHODS.items())


def _split(a: int, b: int) -> str:
    ones_a, ones_b = a % 10, b % 10
    tens_a, tens_b = a - ones_a, b - ones_b
    tens, ones = tens_a + tens_b, ones_a + ones_b
    return (
        f"split both into tens and ones : {spell(tens_a)} + {spell(tens_b)} = {spell(tens)} and {ones_a} + {ones_b} = "
        f"{spell(ones)} . together {spell(tens)} + {spell(ones)} = {spell(a + b)}"
    )


def _round(a: int, b: int) -> str:
    excess = 10 - b % 10
    rounded = b + excess
    return (
        f"round the second number up to {spell(rounded)} : {spell(a)} + {spell(rounded)} = {spell(a + rounded)} . "
        f"that is {excess} too many , so {spell(a + rounded)} - {excess} = {spell(a + b)}"
    )


def _count(a: int, b: int) -> str:
    stops = " , ".join(spell(a + 10 * jump) for jump in range(b // 10 + 1))
    return f"count up in jumps of ten : {stops} . then {b % 10} more makes {spell(a + b)}"


def _write(a: int, b: int) -> str:
    right = a % 10 + b % 10
    carry, keep = divmod(right, 10)
    return (
        f"write them in columns : right {a % 10} + {b % 10} = {spell(right)} , keep {keep} carry {carry} . "
        f"left {a // 10} + {b // 10} + {carry} = {spell(a // 10 + b // 10 + carry)}"
    )


def _move(a: int, b: int) -> str:
    moved = 10 - a % 10
    return (
        f"move {moved} from one number to the other : {spell(a)} + {moved} = {spell(a + moved)} and {spell(b)} - "
        f"{moved} = {spell(b - moved)} . now {spell(a + moved)} + {spell(b - moved)} = {spell(a + b)}"
    )


# The first word of each text is the strategy's name.
_METHODS: dict[str, Callable[[int, int], str]] = {
    "split": _split,
    "round": _round,
    "count": _count,
    "write": _write,
    "move": _move,
}

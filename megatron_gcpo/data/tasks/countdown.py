"""Countdown: use every number once, with + - *, to make the target. Problems have several different solutions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement, product
from typing import ClassVar

from megatron_gcpo.data.tasks.base import Problem, Task, spell, words

type Step = tuple[int, str, int, int]
"""left, operator, right, result"""

_WORDS = {"+": "add", "-": "subtract", "*": "multiply"}
_OPERATORS = {word: operator for operator, word in _WORDS.items()}


@dataclass(frozen=True, kw_only=True)
class Countdown(Task):
    """A problem is (numbers in ascending order..., target); the verifier checks every step of the last line."""

    highest: int = 9
    """Numbers are drawn from 1 to this, at most 99."""
    numbers: int = 3
    """How many numbers a problem has: 2 to 4."""
    min_solutions: int = 2
    """Problems with fewer solutions are left out."""
    largest: int = 99
    """No step of a demonstrated solution exceeds it."""

    name: ClassVar[str] = "countdown"
    vocabulary: ClassVar[tuple[str, ...]] = words(", . ? use to make add subtract multiply and get done")

    def __post_init__(self) -> None:
        if not 2 <= self.numbers <= 4:
            raise ValueError(f"task countdown: numbers {self.numbers}: use 2, 3 or 4")
        if not (1 <= self.highest <= 99 and self.min_solutions >= 1 and self.largest >= 1):
            raise ValueError(
                f"task countdown: highest {self.highest}, min_solutions {self.min_solutions}, largest {self.largest}: "
                "need 1 <= highest <= 99 and the others >= 1"
            )
        super().__post_init__()

    @property
    def strategies(self) -> tuple[str, ...]:
        return tuple("".join(operators) for operators in product(_WORDS, repeat=self.numbers - 1))

    def problems(self) -> tuple[Problem, ...]:
        return tuple(self._table())

    def problem_id(self, problem: Problem) -> str:
        return f"countdown-{','.join(map(str, problem[:-1]))}={problem[-1]}"

    def answer(self, problem: Problem) -> str:
        return f"{' '.join(map(str, problem[:-1]))} = {problem[-1]}"

    @staticmethod
    def verify(answer: str, text: str) -> bool:
        numbers, _, target = answer.partition("=")
        left = [int(number) for number in numbers.split()]
        steps = _read_steps(text)
        if len(steps) != len(left) - 1:
            return False
        for a, operator, b, result in steps:
            for used in (a, b):
                if used not in left:
                    return False
                left.remove(used)
            if result != _apply(a, operator, b):
                return False
            left.append(result)
        return left == [int(target)]

    @staticmethod
    def strategy(text: str) -> str:
        return "".join(operator for _, operator, _, _ in _read_steps(text)) or "none"

    def words_prompt(self, problem: Problem) -> str:
        return f"use {' , '.join(map(spell, problem[:-1]))} to make {spell(problem[-1])} ?"

    def natural_prompt(self, problem: Problem) -> str:
        return (
            f"Use each of the numbers {', '.join(map(str, problem[:-1]))} exactly once, with addition, subtraction and "
            f"multiplication, to make {problem[-1]}. Put the steps on the last line and end it with the word done. "
            "For example, to make 25 from 2, 3 and 5: add 3 and 2 to get 5 . multiply 5 and 5 to get 25 . done"
        )

    def solutions(self, problem: Problem) -> tuple[tuple[str, str], ...]:
        return tuple((_strategy(steps), _write_steps(steps)) for steps in self._table()[problem])

    def _table(self) -> dict[Problem, tuple[tuple[Step, ...], ...]]:
        return _solve_all(self.highest, self.numbers, self.min_solutions, self.largest)


def _apply(a: int, operator: str, b: int) -> int:
    return a + b if operator == "+" else a - b if operator == "-" else a * b


def _strategy(steps: tuple[Step, ...]) -> str:
    return "".join(operator for _, operator, _, _ in steps)


def _write_steps(steps: tuple[Step, ...]) -> str:
    lines = [f"{_WORDS[operator]} {spell(a)} and {spell(b)} to get {spell(v)}" for a, operator, b, v in steps]
    return " . ".join([*lines, "done"])


_NUMBER = r"([0-9](?: ?[0-9]){0,8})"
_STEP = re.compile(rf"(add|subtract|multiply) {_NUMBER} and {_NUMBER} to get {_NUMBER}", re.IGNORECASE)
# Longer than any sound last line: a bound on the work that hostile text can cause.
_MAX_CHARACTERS = 1000


def _read_steps(text: str) -> tuple[Step, ...]:
    """The steps of the last line; empty unless the whole line has the form of a solution."""
    line = text.strip()[-_MAX_CHARACTERS:].rpartition("\n")[2]
    parts = [" ".join(part.split()) for part in line.rstrip(" .").split(".")]
    if parts[-1].lower() != "done":
        return ()
    steps = []
    for part in parts[:-1]:
        found = _STEP.fullmatch(part)
        if found is None:
            return ()
        word, *digits = found.groups()
        a, b, result = (int(number.replace(" ", "")) for number in digits)
        steps.append((a, _OPERATORS[word.lower()], b, result))
    return tuple(steps)


@cache
def _solve_all(
    highest: int, numbers: int, min_solutions: int, largest: int
) -> dict[Problem, tuple[tuple[Step, ...], ...]]:
    """Every problem with its solutions, both sorted."""
    table: dict[Problem, tuple[tuple[Step, ...], ...]] = {}
    for pool in combinations_with_replacement(range(1, highest + 1), numbers):
        by_target: dict[int, set[tuple[Step, ...]]] = {}
        for steps in _solve(pool, largest):
            by_target.setdefault(steps[-1][3], set()).add(steps)
        for target, found in sorted(by_target.items()):
            if len(found) >= min_solutions:
                table[(*pool, target)] = tuple(sorted(found))
    return table


def _solve(pool: tuple[int, ...], largest: int) -> list[tuple[Step, ...]]:
    """All step sequences that use up the pool: results stay positive, commuted operands count once."""
    if len(pool) == 1:
        return [()]
    found = []
    for i, j in product(range(len(pool)), repeat=2):
        if i == j:
            continue
        a, b = pool[i], pool[j]
        rest = tuple(number for k, number in enumerate(pool) if k not in (i, j))
        for operator in _WORDS:
            if a < b or (a == b and (i > j or operator == "-")):
                continue
            result = _apply(a, operator, b)
            if result <= largest:
                step = (a, operator, b, result)
                found += [(step, *later) for later in _solve(tuple(sorted((*rest, result))), largest)]
    return found

"""What a packaged task is: problems in a fixed order, demonstrations by strategy, a verifier, disjoint splits."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from megatron_gcpo.seeds import permutation

type Problem = tuple[int, ...]
type Split = Literal["sft", "train", "heldout"]
SPLITS: tuple[str, ...] = get_args(Split.__value__)
STYLES = ("words", "natural")


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """One worked solution."""

    strategy: str
    """Which of the task's strategies it follows."""
    text: str
    """The completion, in the task's style."""
    weight: float
    """How often it is shown relative to the other demonstrations of its problem; 0: never."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A generator of verifiable problems that have several different correct solutions. Fields are its options."""

    style: Literal["words", "natural"] = "words"
    """words: one whitespace-separated word or digit per token of the task's own tokenizer.  natural: the same problems
    in plain sentences with ordinary numbers, for tokenizers of real language models."""
    weights: Mapping[str, float] | None = None
    """Demonstration weight by strategy; strategies left out count 1. Default: all 1."""
    heldout: int = 64
    """Problems of split "heldout"."""
    sft: int | None = None
    """Problems of split "sft"; default: half of those that are not held out. The others are split "train"."""
    split_seed: int = 1
    """Seed of the shuffle before the split. Keep it over the seeds of an experiment, or held-out problems leak."""

    name: ClassVar[str]
    """Key of the task in TASKS."""
    graded: ClassVar[bool] = False
    """Whether ``verify`` tells better from worse among answers that are not right."""
    vocabulary: ClassVar[tuple[str, ...]]
    """Every word a prompt or a demonstration of style "words" can hold, whatever the options; order is token order."""

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"task {self.name}: style {self.style!r} is unknown: use {' or '.join(STYLES)}")
        for strategy, weight in (self.weights or {}).items():
            if strategy not in self.strategies:
                raise ValueError(
                    f"task {self.name}: weights name the strategy {strategy!r}; it has {', '.join(self.strategies)}"
                )
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"task {self.name}: weight of {strategy} is {weight}: use a finite number >= 0")
        if self.heldout < 0 or (self.sft or 0) < 0:
            raise ValueError(f"task {self.name}: heldout {self.heldout} and sft {self.sft} must not be negative")

    @property
    @abstractmethod
    def strategies(self) -> tuple[str, ...]:
        """Names of the strategies, in demonstration order."""

    @abstractmethod
    def problems(self) -> tuple[Problem, ...]:
        """All problems, in an order that depends on the options alone."""

    @abstractmethod
    def problem_id(self, problem: Problem) -> str:
        """Unique among all problems of the task."""

    @abstractmethod
    def answer(self, problem: Problem) -> str:
        """All that ``verify`` needs to know of the problem."""

    @staticmethod
    @abstractmethod
    def verify(answer: str, text: str) -> float:
        """1 when a completion solves the problem with this ``answer``, however it got there, else 0; graded tasks: in [0, 1].
        Total: never raises."""

    @staticmethod
    @abstractmethod
    def strategy(text: str) -> str:
        """Which strategy a completion follows, or "none". For measurements only: rewards must not depend on it."""

    @abstractmethod
    def words_prompt(self, problem: Problem) -> str:
        """The problem in words of the vocabulary."""

    @abstractmethod
    def natural_prompt(self, problem: Problem) -> str:
        """The problem in sentences, saying how the answer must look."""

    @abstractmethod
    def solutions(self, problem: Problem) -> tuple[tuple[str, str], ...]:
        """(strategy, completion in words of the vocabulary) for every known solution."""

    def prompt_text(self, problem: Problem) -> str:
        """The problem in the task's style."""
        return self.words_prompt(problem) if self.style == "words" else self.natural_prompt(problem)

    def demonstrations(self, problem: Problem) -> tuple[Demonstration, ...]:
        """Every known solution in the task's style, weighted by strategy."""
        weights = self.weights or {}
        return tuple(
            Demonstration(
                strategy=strategy,
                text=text if self.style == "words" else join_digits(text),
                weight=float(weights.get(strategy, 1)),
            )
            for strategy, text in self.solutions(problem)
        )

    def split(self, split: str) -> tuple[Problem, ...]:
        """The problems of one split; the three splits are disjoint and hold every problem.

        Raises:
            ValueError: unknown split, or options that ask for more problems than there are.
        """
        if split not in SPLITS:
            raise ValueError(f"task {self.name} has no split {split!r}: use {', '.join(SPLITS)}")
        problems = self.problems()
        rest = len(problems) - self.heldout
        sft = rest // 2 if self.sft is None else self.sft
        if rest < 0 or sft > rest:
            raise ValueError(
                f"task {self.name} has {len(problems)} problems, fewer than heldout {self.heldout} + sft "
                f"{self.sft or 0}: lower them in the source's options"
            )
        bounds = {"heldout": (0, self.heldout), "sft": (self.heldout, self.heldout + sft)}
        first, last = bounds.get(split, (self.heldout + sft, len(problems)))
        return tuple(problems[i] for i in permutation(len(problems), self.split_seed)[first:last])


def words(*lines: str) -> tuple[str, ...]:
    """The ten digits and the words of these lines: a vocabulary."""
    return (*"0123456789", *" ".join(lines).split())


def spell(number: int) -> str:
    """A number as digit words: 27 -> "2 7"."""
    return " ".join(str(number))


def join_digits(text: str) -> str:
    """Digit words to ordinary numbers: "2 7 + 5" -> "27 + 5"."""
    return re.sub(r"(?<=[0-9]) (?=[0-9])", "", text)


# Only the end of a completion is looked at: a bound on the work that hostile text can cause.
_TAIL_CHARACTERS = 80
_FINAL_NUMBER = re.compile(r"\banswer(?: is)?[ :=]{1,3}([0-9](?: ?[0-9]){0,19})$", re.IGNORECASE)


def final_number(text: str) -> int | None:
    """The number after the word "answer" that ends a completion ("answer 7 2", "The answer is 72."), else None."""
    found = _FINAL_NUMBER.search(text.rstrip(" \t\r\n.")[-_TAIL_CHARACTERS:])
    return int(found.group(1).replace(" ", "")) if found else None

"""Verifiers for the tests that run the completion as Python code, the worst a model can do. Loaded by file path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_gcpo.verify.base import Sample, Verifier

_WARM = (Sample("", "", {}, "import ctypes, mmap, re, resource, signal, socket, subprocess, threading\nreward = 1.0"),)


@dataclass(frozen=True, kw_only=True)
class Payload(Verifier):
    """The reward is what the completion assigns to ``reward``."""

    warm: ClassVar[tuple[Sample, ...]] = _WARM

    def judge(self, sample: Sample) -> float:
        namespace: dict[str, Any] = {"extras": sample.extras, "self": self}
        exec(sample.completion, namespace)
        return namespace["reward"]

    def prepare(self, sample: Sample) -> None:
        if sample.extras.get("misuse"):
            raise ValueError("verify.name=payload cannot take this prompt: set data.train.kind to something else")


@dataclass(frozen=True, kw_only=True)
class Broken(Payload):
    """Does not load."""

    def prepare(self, sample: Sample) -> None:
        raise RuntimeError("its data file is gone")


@dataclass(frozen=True, kw_only=True)
class Late(Payload):
    """Needs at judging time what only an unconfined process can have."""

    warm: ClassVar[tuple[Sample, ...]] = (Sample("", "", {}, "open('/dev/null', 'w')\nreward = 1.0"),)


@dataclass(frozen=True, kw_only=True)
class Optioned(Payload):
    """Has options of every kind."""

    words: str = "a"
    share: float = 0.5
    flag: bool = False
    pattern: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share {self.share}: use a number from 0 to 1")

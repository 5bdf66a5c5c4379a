"""Phase timers that add up to the step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_gcpo.cluster.deadline import Watch

PHASES = ("generate", "verify", "embed", "credit", "logprobs", "prepare", "update", "push")
"""The phases of a step, in order; what is left of it is reported as ``other``."""


class Stopwatch:
    """Seconds spent in each phase since construction; the watch hears where this rank is. Phases do not nest."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        with self._watch.phase(phase):
            yield
        self._seconds[phase] += time.perf_counter() - begin

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, with ``other`` and ``total``; the phases and ``other`` sum to ``total``."""
        total = time.perf_counter() - self._start
        return {**self._seconds, "other": total - sum(self._seconds.values()), "total": total}

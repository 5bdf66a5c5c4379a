"""Where the groups of a step come from: drawn when asked for, or ahead of time by a thread while the trainer trains.

Steps are drawn in order, each whole: which prompts and which seeds is a pure function of the step, so nothing that is drawn
ahead has to be kept. A run that resumes draws again what was under way, with the weights of its checkpoint.

The weights in force before step s are version s. With a lag of n, step s may begin to be drawn once version s - n is in
force; every token of it then comes from one of the versions s - n to s, and at most n + 1 steps are drawn, waiting or being
trained on at a time. A push stops the engine between two tokens: what is under way goes on with the new weights, and each
token carries the version that drew it. At which token that happens depends on the clock: with a lag a run repeats its
prompts and random numbers, but not its tokens.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from megatron_gcpo.rollout.engine import RolloutEngine
from megatron_gcpo.types import Group

type Draw = Callable[[int, int], list[Group]]
"""(step, round) -> the groups of this replica's share, from the weights that the engine holds. Never collective."""

CLOSE_S = 30.0
"""How long ``close`` waits for an engine to notice that it is no longer wanted."""


class Rollouts(Protocol):
    """The groups of a replica, step by step."""

    def begin(self, step: int) -> None:
        """The run goes on with this step, on the weights that were pushed."""
        ...

    def take(self, step: int, round: int = 0) -> list[Group]:
        """The groups of a step, or of one of its refill rounds. Each step once, in order."""
        ...

    def exclusive(self) -> AbstractContextManager[None]:
        """The engine is the caller's inside: what was being drawn is finished, nothing new is begun."""
        ...

    def updating(self, version: int | None) -> AbstractContextManager[None]:
        """Around a push of weights that become ``version``: no token is drawn inside."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What was measured since the last call."""
        ...

    def close(self) -> None:
        """Draw nothing any more; returns at once when nothing is being drawn."""
        ...


@dataclass(frozen=True, kw_only=True)
class Synchronous:
    """Every step is drawn when it is asked for, with the newest weights."""

    draw: Draw

    def begin(self, step: int) -> None:
        """Nothing to begin."""

    def take(self, step: int, round: int = 0) -> list[Group]:
        return self.draw(step, round)

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def updating(self, version: int | None) -> AbstractContextManager[None]:
        return nullcontext()

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing to end."""


class Background:
    """A thread draws up to ``max_lag`` steps ahead of the one that is trained on.

    A refill round is drawn with the newest weights, once what is under way is finished.
    Before ``begin`` and after ``close`` the engine is the caller's. An error of the thread is raised by the next ``take``,
    ``exclusive`` or ``updating``, and at once in one that waits.
    """

    def __init__(self, draw: Draw, engine: RolloutEngine, *, max_lag: int, num_steps: int) -> None:
        """num_steps: of the whole run; none beyond is drawn."""
        self._draw, self._engine = draw, engine
        self._max_lag, self._num_steps = max_lag, num_steps
        self._changed = threading.Condition()
        self._ready: dict[int, list[Group]] = {}
        self._version = -1
        self._next = 0
        self._busy = False
        self._visitors = 0
        self._closing = False
        self._error: Exception | None = None
        self._drawing_s: dict[int, float] = {}
        self._metrics: dict[str, float] = {}
        # a daemon: should the engine never answer, the process can still end
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)

    def begin(self, step: int) -> None:
        assert step == self._version, f"got step {step}, expected {self._version}, whose weights are in force"
        self._next = step
        self._thread.start()

    def take(self, step: int, round: int = 0) -> list[Group]:
        if round:
            with self.exclusive():
                return self._draw(step, round)
        begin = time.perf_counter()
        with self._changed:
            assert step == self._version, f"got step {step}, expected {self._version}, whose weights are in force"
            self._wait_for(lambda: step in self._ready)
            groups = self._ready.pop(step)
            drawing_s = self._drawing_s.pop(step)
        oldest = min(rollout.policy_version for group in groups for rollout in group.rollouts)
        assert oldest >= step - self._max_lag, f"got tokens of version {oldest} in step {step}, lag {self._max_lag}"
        waited_s = time.perf_counter() - begin
        self._metrics = {
            "lag/drawing_s": drawing_s,
            "lag/overlap_share": max(0.0, 1 - waited_s / drawing_s) if drawing_s > 0 else 1.0,
        }
        return groups

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._visitors += 1
        try:
            with self._changed:
                self._wait_for(lambda: not self._busy)
            yield
        finally:
            with self._changed:
                self._visitors -= 1
                self._changed.notify_all()

    @contextmanager
    def updating(self, version: int | None) -> Iterator[None]:
        assert version is not None, "got a push without a version, expected the step that it is for"
        with self._changed:
            self._wait_for(lambda: True)
        self._engine.pause()
        try:
            yield
        finally:
            self._engine.resume()
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def take_metrics(self) -> dict[str, float]:
        """lag/drawing_s: time to draw the step; lag/overlap_share: the part of it that nobody waited for."""
        taken, self._metrics = self._metrics, {}
        return taken

    def close(self) -> None:
        with self._changed:
            self._closing = True
            busy = self._busy
            self._changed.notify_all()
        if busy:
            # the engine may be gone, which is why we close
            with contextlib.suppress(ValueError):
                self._engine.refuse("the run has ended")
                self._engine.resume()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Holding the lock; raises what ended the thread as soon as it has ended."""
        self._changed.wait_for(lambda: self._error is not None or condition())
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while (step := self._await_turn()) is not None:
                begin = time.perf_counter()
                groups = self._draw(step, 0)
                with self._changed:
                    self._ready[step], self._drawing_s[step] = groups, time.perf_counter() - begin
                    self._busy = False
                    self._changed.notify_all()
        except Exception as error:  # whatever it is belongs to the thread that waits for the groups
            with self._changed:
                self._error = error
                self._busy = False
                self._changed.notify_all()

    def _await_turn(self) -> int | None:
        """The step to draw now; None: no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._next >= self._num_steps or self._may_begin())
            if self._closing or self._next >= self._num_steps:
                return None
            self._busy = True
            self._next += 1
            return self._next - 1

    def _may_begin(self) -> bool:
        return not self._visitors and self._next <= self._version + self._max_lag

"""Drawing ahead: which version draws which token, how far ahead, and what happens when something fails."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from megatron_gcpo.rollout.background import Background, Synchronous
from megatron_gcpo.rollout.gate import Gate
from megatron_gcpo.types import Group, Prompt, Rollout

TOKENS = 4
WAIT_S = 30.0


class ScriptedEngine:
    """Draws a token only when told to, from the version it holds."""

    def __init__(self, *, free: bool = False) -> None:
        self.version = -1
        self.free = free
        self.permits = threading.Semaphore(0)
        self.begun: list[int] = []
        self.drawn = threading.Semaphore(0)
        self.active = 0
        self.fails_at: int | None = None
        self.unfit: str | None = None
        self._gate = Gate()

    def draw(self, step: int, round: int) -> list[Group]:
        if step == self.fails_at:
            raise ValueError(f"no groups for step {step}")
        self.begun.append(step)
        versions = []
        with self._gate.drawing():
            self.active += 1
            for _ in range(TOKENS):
                if not self.free:
                    # parked at the gate, so that a pause returns while no token is wanted
                    while not self.permits.acquire(timeout=0.001):
                        self._gate.step()
                        if self.unfit:
                            raise ValueError(self.unfit)
                self._gate.step()
                versions.append(self.version)
                self.drawn.release()
            self.active -= 1
        rollout = Rollout(
            token_ids=np.arange(TOKENS),
            logprobs=np.zeros(TOKENS, np.float32),
            text="",
            finish_reason="length",
            versions_T=np.array(versions, np.int32),
        )
        return [Group(prompt=Prompt(id=f"{step}/{round}", token_ids=(1,), text="", answer=""), rollouts=(rollout,))]

    def let(self, tokens: int) -> None:
        """Draw so many tokens, and return when they are there."""
        for _ in range(tokens):
            self.permits.release()
        for _ in range(tokens):
            assert self.drawn.acquire(timeout=WAIT_S)

    def pause(self) -> None:
        self._gate.pause()

    def resume(self) -> None:
        self._gate.resume()

    def refuse(self, reason: str) -> None:
        self.unfit = reason


def background(engine: ScriptedEngine, max_lag: int = 1, num_steps: int = 100) -> Background:
    unchecked: Any = engine
    return Background(engine.draw, unchecked, max_lag=max_lag, num_steps=num_steps)


def push(rollouts: Background, engine: ScriptedEngine, version: int) -> None:
    with rollouts.updating(version):
        engine.version = version


def versions(groups: list[Group]) -> list[int]:
    return groups[0].rollouts[0].versions_T.tolist()


def until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_lag_one_draws_the_next_step_meanwhile_and_goes_on_with_the_new_weights() -> None:
    engine = ScriptedEngine()
    rollouts = background(engine, max_lag=1, num_steps=4)
    push(rollouts, engine, 0)
    rollouts.begin(0)
    engine.let(TOKENS)
    assert versions(rollouts.take(0)) == [0, 0, 0, 0]
    engine.let(2)  # of step 1, while the trainer works on step 0
    push(rollouts, engine, 1)
    engine.let(2)
    taken = rollouts.take(1)
    assert (taken[0].prompt.id, versions(taken)) == ("1/0", [0, 0, 1, 1])
    engine.let(TOKENS)
    time.sleep(0.05)
    assert engine.begun == [0, 1, 2]  # step 3 would be two versions behind
    push(rollouts, engine, 2)
    assert versions(rollouts.take(2)) == [1, 1, 1, 1]
    engine.let(1)
    push(rollouts, engine, 3)
    engine.let(3)
    assert versions(rollouts.take(3)) == [2, 3, 3, 3]
    push(rollouts, engine, 4)
    time.sleep(0.05)
    assert engine.begun == [0, 1, 2, 3]  # the run has no more
    rollouts.close()


@pytest.mark.parametrize("max_lag", [1, 2, 4])
def test_the_queue_is_bounded_and_every_step_comes_once_in_order(max_lag: int) -> None:
    rng = random.Random(max_lag)
    engine = ScriptedEngine(free=True)
    rollouts = background(engine, max_lag=max_lag, num_steps=30)
    push(rollouts, engine, 0)
    rollouts.begin(0)
    seen_lags = set()
    for step in range(30):
        groups = rollouts.take(step)
        assert groups[0].prompt.id == f"{step}/0"
        assert set(versions(groups)) <= set(range(max(0, step - max_lag), step + 1))
        seen_lags |= {step - v for v in versions(groups)}
        time.sleep(rng.choice([0, 0, 0.003]))
        assert engine.begun[-1] <= step + max_lag
        push(rollouts, engine, step + 1)
    assert engine.begun == list(range(30))
    assert max(seen_lags) <= max_lag
    assert max_lag in seen_lags or max_lag > 1
    rollouts.close()


def test_a_resumed_run_begins_with_its_step() -> None:
    engine = ScriptedEngine(free=True)
    rollouts = background(engine, max_lag=2, num_steps=9)
    push(rollouts, engine, 5)
    rollouts.begin(5)
    assert [versions(rollouts.take(5)), engine.begun[0]] == [[5] * TOKENS, 5]
    rollouts.close()


def test_a_visitor_has_the_engine_alone_and_refills_are_drawn_now() -> None:
    engine = ScriptedEngine()
    rollouts = background(engine, max_lag=1, num_steps=9)
    push(rollouts, engine, 0)
    rollouts.begin(0)
    until(lambda: engine.active)
    arrived: list[int] = []

    def visit() -> None:
        with rollouts.exclusive():
            arrived.append(engine.active)
            time.sleep(0.02)
            arrived.append(len(engine.begun))

    visitor = threading.Thread(target=visit)
    visitor.start()
    engine.let(3)
    assert not arrived  # what was under way is finished first
    engine.let(1)
    visitor.join(WAIT_S)
    assert arrived == [0, 1]
    assert versions(rollouts.take(0)) == [0] * TOKENS
    engine.let(TOKENS)
    engine.free = True
    push(rollouts, engine, 1)
    assert versions(rollouts.take(1)) == [0] * TOKENS
    refill = rollouts.take(1, round=2)
    assert (refill[0].prompt.id, versions(refill)) == ("1/2", [1] * TOKENS)
    rollouts.close()


def test_an_error_reaches_whoever_waits_and_whoever_comes_next() -> None:
    engine = ScriptedEngine()
    engine.fails_at = 1
    rollouts = background(engine, max_lag=1, num_steps=9)
    push(rollouts, engine, 0)
    rollouts.begin(0)
    engine.let(TOKENS)
    until(lambda: rollouts._error is not None)
    for call in (lambda: rollouts.take(0), lambda: push(rollouts, engine, 1), lambda: rollouts.take(0, round=1)):
        with pytest.raises(ValueError, match=r"^no groups for step 1$"):
            call()
    assert engine.version == 0
    rollouts.close()


def test_an_error_ends_a_wait_at_once() -> None:
    engine = ScriptedEngine()
    rollouts = background(engine, num_steps=9)
    push(rollouts, engine, 0)
    rollouts.begin(0)
    until(lambda: engine.active)
    threading.Timer(0.05, lambda: engine.refuse("the server is gone")).start()
    with pytest.raises(ValueError, match="the server is gone"):
        rollouts.take(0)
    rollouts.close()


def test_a_failed_push_lets_the_thread_end() -> None:
    engine = ScriptedEngine()
    rollouts = background(engine, num_steps=9)
    push(rollouts, engine, 0)
    rollouts.begin(0)
    until(lambda: engine.active)

    def fail() -> None:
        with rollouts.updating(1):
            engine.refuse("the weights are unfit")
            raise ValueError("half of it arrived")

    with pytest.raises(ValueError, match="half of it arrived"):
        fail()
    rollouts._thread.join(WAIT_S)
    assert not rollouts._thread.is_alive()
    rollouts.close()


def test_closing_does_not_wait_for_what_nobody_will_take() -> None:
    engine = ScriptedEngine()
    rollouts = background(engine, num_steps=9)
    push(rollouts, engine, 0)
    rollouts.begin(0)
    until(lambda: engine.active)
    rollouts.close()
    assert not rollouts._thread.is_alive()
    assert background(engine).close() is None  # never started


def test_overlap_is_what_nobody_waited_for() -> None:
    engine = ScriptedEngine()
    rollouts = background(engine, num_steps=9)
    push(rollouts, engine, 0)
    rollouts.begin(0)
    engine.let(TOKENS)
    until(lambda: 0 in rollouts._ready)
    rollouts.take(0)
    seen = rollouts.take_metrics()
    assert seen["lag/drawing_s"] > 0
    assert 0 <= seen["lag/overlap_share"] <= 1
    assert rollouts.take_metrics() == {}
    rollouts.close()


def test_synchronous_draws_when_asked() -> None:
    engine = ScriptedEngine(free=True)
    rollouts = Synchronous(draw=engine.draw)
    with rollouts.updating(3):
        engine.version = 3
    with rollouts.exclusive():
        assert versions(rollouts.take(8, round=1)) == [3] * TOKENS
    assert (engine.begun, rollouts.take_metrics()) == ([8], {})
    rollouts.close()

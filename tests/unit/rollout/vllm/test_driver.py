"""Callers in several threads share an engine's steps; a pause holds all of them; a failure leaves nothing behind."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest

from megatron_gcpo.rollout.vllm.driver import Driver


class CountingEngine:
    """Each step advances every request by one; a request ends after as many steps as its first token id says."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.steps = 0
        self.in_step = threading.Lock()

    def add_request(self, name: str, prompt: dict[str, Any], params: Any, lora_request: Any = None) -> None:
        if params == "bad":
            raise ValueError("bad parameters")
        self.left[name] = prompt["prompt_token_ids"][0]

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.left.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        assert self.in_step.acquire(blocking=False), "two threads in a step at once"
        self.steps += 1
        outputs = []
        for name in list(self.left):
            self.left[name] -= 1
            if done := self.left[name] == 0:
                del self.left[name]
            outputs.append(types.SimpleNamespace(request_id=name, finished=done, took=self.steps))
        self.in_step.release()
        return outputs


def fit() -> None: ...


def test_answers_come_in_the_order_of_the_requests() -> None:
    driver = Driver(CountingEngine())
    assert [output.took for output in driver.run([([3], None), ([1], None), ([2], None)], fit)] == [3, 1, 2]
    assert driver.run([], fit) == []


def test_threads_are_served_by_the_same_steps() -> None:
    engine = CountingEngine()
    driver = Driver(engine)
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(len(driver.run([([50 + n], None)] * 3, fit))))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [3, 3, 3, 3]
    assert engine.steps <= sum(50 + n for n in range(4))
    assert not driver.busy


def test_a_pause_holds_every_step_but_those_that_may_take_them() -> None:
    engine = CountingEngine()
    driver = Driver(engine)
    driver.pause()
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.extend(driver.run([([5], None)], fit)))
    thread.start()
    while not engine.has_unfinished_requests():
        thread.join(0.01)
    assert engine.steps == 0
    assert not driver.busy
    driver.run([([2], None)], fit, also_paused=True)
    assert engine.steps == 2
    driver.resume()
    thread.join(30)
    assert [output.took for output in answers] == [5]


def test_an_unfit_engine_ends_what_is_under_way() -> None:
    engine = CountingEngine()
    driver = Driver(engine)
    asked = 0

    def unfit_later() -> None:
        nonlocal asked
        asked += 1
        if asked == 4:
            raise ValueError("unfit")

    with pytest.raises(ValueError, match="unfit"):
        driver.run([([10], None), ([1], None)], unfit_later)
    assert engine.steps == 2
    assert not engine.left
    assert driver._answers == {}


def test_a_bad_request_takes_its_neighbours_back() -> None:
    engine = CountingEngine()
    driver = Driver(engine)
    with pytest.raises(ValueError, match="bad parameters"):
        driver.run([([10], None), ([1], "bad")], fit)
    assert not engine.left
    assert [output.took for output in driver.run([([1], None)], fit)] == [1]

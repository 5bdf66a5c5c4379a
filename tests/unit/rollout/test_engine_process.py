"""The transformers engine in a process of its own: the same answers, pauses that reach it, and what its death means."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig

from megatron_gcpo.rollout.engine import SampleRequest, Sampling
from megatron_gcpo.rollout.engine_process import EngineProcess
from tests.unit.rollout.models import CONFIGS, SHAPE, random_model
from tests.unit.rollout.test_in_flight import SAMPLING, engine_of, requests
from tests.unit.rollout.test_transformers_engine import checkpoint, full_forward_logprobs

CPU = torch.device("cpu")


def start(config: Any) -> EngineProcess:
    return EngineProcess(config, device=CPU, dtype=torch.float32, max_batch_rows=64, num_threads=1)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    made = start(CONFIGS["qwen3"])
    yield made
    made.close()
    assert made._process.poll() is not None


def test_answers_are_those_of_the_embedded_engine_bit_for_bit(engine: EngineProcess) -> None:
    embedded = engine_of("qwen3")
    with pytest.raises(ValueError, match="none were loaded yet"):
        engine.generate(requests(1), SAMPLING)
    for push in (0, 1):
        for side in (engine, embedded):
            side.load_weights(checkpoint(random_model("qwen3", seed=push)).items(), version=push + 4)
        assert (engine.policy_version, engine.max_positions) == (push + 4, embedded.max_positions)
        for one, other in zip(*(side.generate(requests(), SAMPLING) for side in (engine, embedded)), strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
            np.testing.assert_array_equal(one.versions_T, other.versions_T)
        sequence = [((5, 9, 3), (4, 9))]
        np.testing.assert_array_equal(engine.score(sequence, 0.7)[0], embedded.score(sequence, 0.7)[0])


def test_weights_change_in_flight(engine: EngineProcess) -> None:
    models = [random_model("qwen3", seed=s) for s in (0, 1)]
    engine.load_weights(checkpoint(models[0]).items(), version=0)
    many = [SampleRequest(prompt_token_ids=(5, 9, 3), seed=s, max_new_tokens=90) for s in range(64)]
    result: list[Any] = []
    drawing = threading.Thread(target=lambda: result.append(engine.generate(many, Sampling())))
    drawing.start()
    version = 0
    while drawing.is_alive():
        version += 1
        engine.pause()
        engine.load_weights(checkpoint(models[version % 2]).items(), version=version)
        engine.score([((5,), (4,))])
        engine.resume()
        time.sleep(0.02)
    assert len({v for sample in result[0] for v in sample.versions_T.tolist()}) > 1
    for sample in result[0][:6]:
        by_model = [full_forward_logprobs(m, (5, 9, 3), sample.token_ids.tolist()) for m in models]
        expected = np.where(sample.versions_T % 2, by_model[1], by_model[0])
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


def test_a_load_that_fails_on_either_side_is_refused_and_can_be_repeated(engine: EngineProcess) -> None:
    good = checkpoint(random_model("qwen3"))
    with pytest.raises(ValueError, match="'nonsense' is no tensor of"):
        engine.load_weights([("nonsense", torch.zeros(3)), *good.items()])
    with pytest.raises(ValueError, match="the last load failed"):
        engine.generate(requests(1), SAMPLING)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(good.items())[:3]
        raise RuntimeError("the exporter failed")

    with pytest.raises(RuntimeError, match="the exporter failed"):
        engine.load_weights(broken())
    with pytest.raises(ValueError, match="the sender gave up"):
        engine.score([((5,), (4,))])
    engine.load_weights([(name, t.bfloat16()) for name, t in good.items()])
    assert len(engine.generate(requests(1), SAMPLING)) == 4
    engine.refuse("of a test")
    with pytest.raises(ValueError, match="unfit: of a test"):
        engine.generate(requests(1), SAMPLING)


def test_what_the_engine_refuses_at_construction_is_raised_here() -> None:
    with pytest.raises(ValueError, match="sliding_attention"):
        start(MistralConfig(**SHAPE, sliding_window=8))


def test_a_killed_engine_is_reported_in_one_line(engine: EngineProcess) -> None:
    """The last test: the process of the module is gone after it."""
    engine.load_weights(checkpoint(random_model("qwen3")).items())
    many = [SampleRequest(prompt_token_ids=(5, 9, 3), seed=s, max_new_tokens=90) for s in range(64)]
    threading.Timer(0.3, lambda: os.kill(engine._process.pid, signal.SIGKILL)).start()

    def draw_on() -> None:
        while True:
            engine.generate(many, Sampling())

    with pytest.raises(ValueError, match="the process of the rollout engine was killed by SIGKILL"):
        draw_on()
    with pytest.raises(ValueError, match="was killed by SIGKILL"):
        engine.pause()

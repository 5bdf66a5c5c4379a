"""What the tests of the engine behind URLs share: requests, pushes without bytes, and whether the answers are right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from megatron_gcpo.rollout.engine import SampleRequest, Sampling
from megatron_gcpo.rollout.vllm.server import ServerEngine
from tests.vllm.fake_server import logprob_of, tokens_of

POSITIONS = 64
REQUESTS = [SampleRequest(prompt_token_ids=(1, 2, n), seed=1000 + n, max_new_tokens=4 + n % 3) for n in range(24)]


def push(engine: ServerEngine, version: int) -> None:
    control = engine.control
    assert control is not None
    control.init_weight_transfer_engine({})
    control.start_weight_update()
    control.update_weights({})
    control.finish_weight_update(version)
    engine.commit(version)


def check_all(engine: ServerEngine, version: int) -> None:
    """Every request is answered, in order, with the completion that its prompt and seed have on every server."""
    for request, sample in zip(REQUESTS, engine.generate(REQUESTS, Sampling()), strict=True):
        tokens = tokens_of(list(request.prompt_token_ids), request.seed, request.max_new_tokens)
        assert sample.token_ids.tolist() == tokens
        np.testing.assert_allclose(sample.logprobs, [logprob_of(t) for t in tokens], rtol=1e-6)
        assert sample.finish_reason == "length"
        assert sample.versions_T.tolist() == [version] * len(tokens)


def background(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start ``work`` in a thread; the result joins it and returns what it returned, or raises what it raised."""
    box: dict[str, Any] = {}

    def run() -> None:
        try:
            box["result"] = work()
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> Any:
        thread.join(30)
        assert not thread.is_alive()
        if "error" in box:
            raise box["error"]
        return box["result"]

    return join


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)

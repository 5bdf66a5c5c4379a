"""The engine behind URLs against servers that misbehave: no request is lost, and none is answered by other weights."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatron_gcpo.rollout.engine import SampleRequest, Sampling

pytest.importorskip("aiohttp", reason="aiohttp comes with `make vllm`")

from aiohttp import web

from megatron_gcpo.rollout.vllm.local import is_loopback, is_this_machine
from megatron_gcpo.rollout.vllm.server import ServerEngine
from tests.unit.rollout.vllm.fakes import REQUESTS, background, check_all, push, until
from tests.vllm.fake_server import FakeServer, logprob_of


def test_balance_and_bound(connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]) -> None:
    fakes = servers(2)
    engine = connect(*fakes)
    push(engine, 1)
    check_all(engine, 1)
    assert all(len(fake.asked) >= len(REQUESTS) // 3 for fake in fakes)
    assert all(fake.most_at_once <= 8 for fake in fakes)
    assert all("/reset_prefix_cache" in fake.log for fake in fakes)


def test_death_in_the_middle_of_a_step(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    first, second = servers(2)
    engine = connect(first, second)
    push(engine, 1)

    async def die(server: FakeServer, request: web.Request, body: dict[str, Any]) -> None:
        if len(server.asked) >= 5:
            threading.Thread(target=server.kill).start()
        await asyncio.sleep(60)

    first.behave = die
    check_all(engine, 1)
    lost = [body["sampling_params"]["seed"] for body in first.asked]
    answered = [body["sampling_params"]["seed"] for body in second.asked]
    assert set(lost) <= set(answered)
    assert sorted(answered) == sorted(request.seed for request in REQUESTS)
    second.kill()
    with pytest.raises(ValueError, match=r"none of the 2 rollout servers can serve \(http.*cannot be reached.*; http"):
        engine.generate(REQUESTS, Sampling())
    second.start()
    first.behave = None
    push(engine, 2)
    check_all(engine, 2)


def spoil(change: Callable[[dict[str, Any]], None]) -> Any:
    async def behave(server: FakeServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = server.completion(body["token_ids"], body["sampling_params"])
        change(answer)
        return web.json_response(answer)

    return behave


async def no_json(server: FakeServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="<html>gateway</html>", content_type="text/html")


async def fails(server: FakeServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "EngineCore died"}}, status=500)


GARBAGE = {
    "no JSON": (no_json, "answered no JSON, but '<html>gateway</html>'"),
    "an error": (fails, "answered 500: EngineCore died"),
    "no choice": (spoil(lambda a: a.update(choices=[])), "no completion"),
    "a list": (spoil(lambda a: a.update(choices=3)), "no completion"),
    "too few log-probs": (spoil(lambda a: a["choices"][0]["logprobs"]["content"].pop()), "log-probs of other tokens"),
    "no number": (spoil(lambda a: a["choices"][0]["logprobs"]["content"][0].update(logprob=-9999.0)), "not finite"),
    "cut off": (spoil(lambda a: a["choices"][0].update(finish_reason="abort")), "'abort'"),
    "no versions": (spoil(lambda a: a["choices"][0].update(weight_versions=[])), "did not say which weights"),
    "foreign weights": (
        spoil(lambda a: a["choices"][0]["weight_versions"][0].update(version="12")),
        "weights '12', which this run did not push",
    ),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_asked_again_elsewhere_and_named_when_there_is_nowhere(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]], kind: str
) -> None:
    first, second = servers(2)
    engine = connect(first, second)
    push(engine, 1)
    first.behave, message = GARBAGE[kind]
    check_all(engine, 1)
    second.behave = first.behave
    with pytest.raises(ValueError, match=message):
        engine.generate(REQUESTS[:1], Sampling())


def test_routed_experts(connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]) -> None:
    """The last token never passed through the model: -1; what is no array is no answer."""
    (server,) = servers(1)
    engine = connect(server)
    push(engine, 1)
    assert engine.generate(REQUESTS[:1], Sampling())[0].routed_experts is None
    routed = np.arange(2 * 3 * 2, dtype=np.uint8).reshape(2, 3, 2).repeat(3, 0)  # 3 + 4 tokens, less one
    file = io.BytesIO()
    np.save(file, routed)
    encoded = base64.b64encode(file.getvalue()).decode()
    server.behave = spoil(lambda a: a["choices"][0].update(routed_experts=encoded))
    (sample,) = engine.generate(REQUESTS[:1], Sampling())
    assert sample.routed_experts is not None
    assert sample.routed_experts.shape == (7, 3, 2)
    assert sample.routed_experts[:6].tolist() == routed.tolist()
    assert (sample.routed_experts[6] == -1).all()
    server.behave = spoil(lambda a: a["choices"][0].update(routed_experts="gibberish"))
    with pytest.raises(ValueError, match="no completion"):
        engine.generate(REQUESTS[:1], Sampling())


def test_one_server_that_fails_now_and_then(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    (server,) = servers(1)
    engine = connect(server)
    push(engine, 1)
    seen: set[int] = set()

    async def first_time(server: FakeServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        seed = body["sampling_params"]["seed"]
        if seed in seen:
            return None
        seen.add(seed)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    server.behave = first_time
    check_all(engine, 1)
    assert len(server.asked) == 2 * len(REQUESTS)


def test_stall(connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]) -> None:
    first, second = servers(2)
    engine = connect(first, second, request_timeout_s=0.5, max_retries=1)
    push(engine, 1)

    async def stall(server: FakeServer, request: web.Request, body: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    first.behave = stall
    check_all(engine, 1)
    before = len(first.asked)
    check_all(engine, 1)
    assert len(first.asked) == before  # it counts as out
    second.behave = stall
    with pytest.raises(ValueError, match=r"failed 2 times .*max_retries=1 .*did not answer within 0\.5 s"):
        engine.generate(REQUESTS[:1], Sampling())


def test_a_refused_request_is_not_asked_again(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    fakes = servers(2)
    engine = connect(*fakes)
    push(engine, 1)

    async def reject(server: FakeServer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "min_p is not supported"}}, status=400)

    for fake in fakes:
        fake.behave = reject
    with pytest.raises(ValueError, match=r"refused request 0: .* answered 400: min_p is not supported"):
        engine.generate(REQUESTS[:1], Sampling())
    assert sum(len(fake.asked) for fake in fakes) == 1


def test_lengths_are_checked_before_anything_is_sent(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    engine = connect(*servers(1))
    push(engine, 1)
    long = SampleRequest(prompt_token_ids=(1,) * 60, seed=0, max_new_tokens=5)
    with pytest.raises(ValueError, match=r"request 1 has 60 tokens and 5 may be generated, .* 64 positions"):
        engine.generate([REQUESTS[0], long], Sampling())
    with pytest.raises(ValueError, match="no tokens"):
        engine.score([((), (3,))])


def test_pause_holds_requests_back_and_does_not_count_as_a_stall(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    fakes = servers(2)
    engine = connect(*fakes, request_timeout_s=0.6)
    push(engine, 1)
    engine.pause()
    asked = [len(fake.asked) for fake in fakes]
    answers = background(lambda: check_all(engine, 2))
    time.sleep(1.0)
    assert [len(fake.asked) for fake in fakes] == asked
    push(engine, 2)
    engine.resume()
    answers()


def test_requests_under_way_go_on_after_a_pause(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    fakes = servers(2)
    engine = connect(*fakes, request_timeout_s=0.8)
    push(engine, 1)

    async def wait(server: FakeServer, request: web.Request, body: dict[str, Any]) -> None:
        while server.label.endswith(".1"):
            await asyncio.sleep(0.01)

    for fake in fakes:
        fake.behave = wait
    answers = background(lambda: check_all(engine, 2))
    until(lambda: sum(len(fake.asked) for fake in fakes) == 16)  # all that fit
    with pytest.raises(ValueError, match=r"pause\(\) the rollout engine first"):
        push(engine, 2)
    engine.pause()
    time.sleep(1.0)
    push(engine, 2)
    engine.resume()
    answers()
    assert sum(len(fake.asked) for fake in fakes) == len(REQUESTS)  # nothing was asked twice


def test_refuse_breaks_off_what_is_under_way(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    (server,) = servers(1)
    engine = connect(server)
    push(engine, 1)

    async def wait(server: FakeServer, request: web.Request, body: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    server.behave = wait
    answers = background(lambda: engine.generate(REQUESTS, Sampling()))
    until(lambda: len(server.asked) == 8)
    engine.pause()
    engine.refuse("a byte was corrupted")
    engine.resume()
    with pytest.raises(ValueError, match="unfit: a byte was corrupted"):
        answers()
    server.behave = None
    push(engine, 2)
    check_all(engine, 2)


def test_score(connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]) -> None:
    fakes = servers(2)
    engine = connect(*fakes)
    push(engine, 1)
    sequences = [((1, 2, n), np.arange(5 + n)) for n in range(6)]
    for paused in (False, True):
        if paused:
            engine.pause()
        for temperature in (1.0, 0.5, 0.5, 1.0):
            for (_, completion), scored_T in zip(sequences, engine.score(sequences, temperature), strict=True):
                assert scored_T.dtype == np.float32
                np.testing.assert_allclose(scored_T, [logprob_of(t, temperature) for t in completion], rtol=1e-6)
        assert all(fake.is_paused == paused for fake in fakes)


def test_this_machine() -> None:
    assert is_this_machine("localhost")
    assert is_this_machine("127.0.0.1")
    assert not is_this_machine("192.0.2.1")  # RFC 5737: nobody's
    assert not is_this_machine("no such host")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("192.0.2.1")

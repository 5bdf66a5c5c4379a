"""An engine meets its servers: what is wrong with one is said at once, by name; and it serves only what was pushed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_gcpo.rollout.engine import Sampling

pytest.importorskip("aiohttp", reason="aiohttp comes with `make vllm`")


from megatron_gcpo.rollout.vllm.server import ServerEngine
from tests.unit.rollout.vllm.fakes import REQUESTS, background, check_all, push
from tests.vllm.fake_server import VOCAB_SIZE, FakeServer


def test_wrong_url(connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]) -> None:
    (dead,) = servers(1)
    dead.kill()
    with pytest.raises(
        ValueError, match=r"no rollout server at http://127.*start_timeout_s.*megatron-gcpo serve.*rollout\.vllm\.urls"
    ):
        connect(dead)
    with pytest.raises(ValueError, match=r"not-a-url.*rollout\.vllm\.urls"):
        connect("not-a-url")


def test_server_that_is_not_vllm(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    with pytest.raises(ValueError, match=r"is not a vLLM server: .*/health answered 404"):
        connect(*servers(1, paths=set()))


def test_missing_capabilities_are_named(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    known = {"/health", "/inference/v1/generate", "/server_info", "/weight_info", "/resume", "/pause"}
    with pytest.raises(ValueError, match=r"vLLM 0\.29\.1\) lacks /collective_rpc, .*megatron-gcpo serve.*tested with"):
        connect(*servers(1, paths=known, version="0.29.1"))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "max_model_len",
            64,
            r"holds 64 positions, fewer than the 64 tokens .* and one more \(rollout.vllm.max_model_len",
        ),
        ("dtype", "torch.bfloat16", r"computes in bfloat16, not in float32 \(rollout.dtype"),
        ("logprobs_mode", "raw_logprobs", r"--logprobs-mode is raw_logprobs"),
        ("worker_extension_cls", "", r"without --worker-extension-cls megatron_gcpo"),
        ("backend", "nccl", r"--weight-transfer-config has backend 'nccl'"),
        ("tensor_parallel_size", 2, r"2-way tensor-parallel, not 1 \(rollout.vllm.tensor_parallel_size"),
        ("quantization", "fp8", r"quantization is fp8"),
        ("enable_return_routed_experts", True, r"returns routed experts, unlike what rollout\.router_replay says"),
        ("vocab_size", VOCAB_SIZE - 1, r"smaller vocabulary than the policy's 100"),
        ("vocab_size", VOCAB_SIZE + 1, r"larger vocabulary than the policy's 100"),
    ],
)
def test_server_that_does_not_fit(
    connect: Callable[..., ServerEngine],
    servers: Callable[..., list[FakeServer]],
    option: str,
    value: Any,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        connect(*servers(1, **{option: value}))


def test_key(connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]], tmp_path: Path) -> None:
    (server,) = servers(1, api_key="s3cret")
    with pytest.raises(ValueError, match=r"wants a key: set rollout\.vllm\.api_key_file"):
        connect(server)
    key = tmp_path / "key"
    with pytest.raises(ValueError, match=r"api_key_file .* cannot be read"):
        connect(server, api_key_file=str(key))
    key.write_text("two words\n")
    with pytest.raises(ValueError, match="must hold one word"):
        connect(server, api_key_file=str(key))
    key.write_text("s3cret\n")
    engine = connect(server, api_key_file=str(key))
    push(engine, 1)
    check_all(engine, 1)


def test_waits_for_a_server_that_starts(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    (server,) = servers(1)
    server.kill()
    connected = background(lambda: connect(server, start_timeout_s=30))
    time.sleep(0.2)
    server.start()
    push(connected(), 1)


def test_a_server_left_paused_by_a_trainer_that_died_is_resumed(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    (server,) = servers(1)
    server.is_paused = True
    connect(server)
    assert not server.is_paused


def test_serves_nothing_before_a_push_and_after_refuse(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    engine = connect(*servers(2))
    with pytest.raises(ValueError, match="none were loaded yet"):
        engine.generate(REQUESTS, Sampling())
    push(engine, 3)
    assert engine.policy_version == 3
    check_all(engine, 3)
    engine.refuse("the fingerprints differ")
    with pytest.raises(ValueError, match="unfit: the fingerprints differ"):
        engine.generate(REQUESTS, Sampling())
    with pytest.raises(ValueError, match="unfit: the fingerprints differ"):
        engine.score([([1], [2])])
    push(engine, 4)
    check_all(engine, 4)
    engine.sleep()
    with pytest.raises(ValueError, match="sleeps"):
        engine.generate(REQUESTS, Sampling())
    engine.wake()
    check_all(engine, 4)
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="the engine was closed"):
        engine.generate(REQUESTS, Sampling())


def test_a_push_that_broke_off_leaves_nothing_serving(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    first, second = servers(2)
    engine = connect(first, second)
    push(engine, 1)
    control = engine.control
    assert control is not None
    assert (control.num_workers, control.same_host) == (2, True)
    assert control.rpc("gcpo_describe") == [{"port": first.port}, {"port": second.port}]
    control.start_weight_update()
    with pytest.raises(ValueError, match=r"a rollout server failed in fail: .*collective_rpc answered 500: .*oops"):
        control.rpc("fail")
    with pytest.raises(ValueError, match="a load of weights did not complete"):
        engine.generate(REQUESTS, Sampling())
    second.kill()
    with pytest.raises(ValueError, match=r"a rollout server was lost in update_weights: .*cannot be reached"):
        control.update_weights({})
    again = engine.control
    assert again is not None
    assert again is not control
    assert again.num_workers == 1
    push(engine, 2)
    check_all(engine, 2)


def test_a_server_that_is_back_stays_out_until_a_push(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    first, second = servers(2)
    engine = connect(first, second)
    push(engine, 1)
    control = engine.control
    assert engine.control is control
    second.kill()
    second.start()
    before = len(second.asked)
    check_all(engine, 1)  # its random weights give themselves away by their name
    check_all(engine, 1)
    assert len(second.asked) == before
    assert engine.control is not control
    check_all(engine, 1)  # met again, but not pushed to
    assert len(second.asked) == before
    push(engine, 2)
    check_all(engine, 2)
    assert len(second.asked) > before


def test_a_server_that_restarts_in_the_middle_of_a_push_is_not_admitted(
    connect: Callable[..., ServerEngine], servers: Callable[..., list[FakeServer]]
) -> None:
    first, second = servers(2)
    engine = connect(first, second)
    control = engine.control
    assert control is not None
    control.start_weight_update()
    control.finish_weight_update(1)
    second.kill()
    second.start()
    engine.commit(1)
    check_all(engine, 1)
    assert not second.asked

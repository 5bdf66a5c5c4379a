"""Trainer ranks that push to plain engines; run by test_reshard.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_gcpo.cluster import platform, topology
from megatron_gcpo.config.records import ClusterConfig, ModelConfig, PushConfig, TrainConfig
from megatron_gcpo.policy.actor import Actor
from megatron_gcpo.policy.build import build
from megatron_gcpo.policy.lora import MARK
from megatron_gcpo.policy.options import DTYPES
from megatron_gcpo.policy.weights import random_hf_state
from megatron_gcpo.reshard.pusher import Pusher
from tests.dist.plain_engine import PlainEngine, share


def make_actor(case: dict[str, Any]) -> Actor:
    cpu = platform.install("cpu")
    cluster = ClusterConfig.model_validate({"platform": "cpu", **case["sizes"]})
    place = topology.init(cluster, cpu)
    model = ModelConfig.model_validate(
        {"hf_config": case["model"], "dtype": case.get("dtype", "fp32"), "lora": case.get("lora")}
    )
    policy = build(model, cluster, cpu, seed=0)
    train = TrainConfig.model_validate({"optimizer": {"lr": 1e-3}})
    return Actor(policy, place, train, temperature=1.0, total_updates=10)


def change_weights(actor: Actor, seed: int) -> None:
    """As an update would: in the trainer's own parameters."""
    from megatron.bridge.models.hf_pretrained.state import StateDict

    state = random_hf_state(actor.policy.hf_config, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in state.items():
        if tensor.ndim == 1:  # norms and biases start out all alike
            state[name] = tensor + torch.randn(tensor.shape, generator=generator) / 10

    class Source:
        config = actor.policy.hf_config
        model_name_or_path = "random"

    Source.state = StateDict(state)

    actor.policy.bridge._model_bridge.load_weights_hf_to_megatron(Source(), actor.policy.chunks)


def change_adapters(actor: Actor, seed: int) -> None:
    """As updates would. B starts at zero: without this the adapted model is the model itself."""
    place = actor.topology
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * place.pp_rank + place.tp_rank)
    for chunk in actor.policy.chunks:
        for name, parameter in chunk.named_parameters():
            if MARK in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8)


def exported(actor: Actor) -> dict[str, torch.Tensor]:
    """By the bridge's own export: the oracle."""
    return {name: tensor.clone() for name, tensor in actor.export()}


def assert_holds(engine: PlainEngine, weights: dict[str, torch.Tensor], *, within: float = 0.0) -> None:
    for rank, parameters in enumerate(engine.rpc("read")):
        assert parameters.keys() == weights.keys()
        for name, held in parameters.items():
            part = weights[name].narrow(*share(name, weights[name].shape, rank, engine.num_workers))
            assert (held - part.to(held.dtype)).abs().max() <= within, f"rank {rank} has other numbers in {name}"


def push_cases(cases: list[dict[str, Any]], folder: str) -> list[Any]:
    """Two pushes of each case, the second of other weights; what the workers hold must be the bridge's export."""
    results = []
    for case in cases:
        actor = make_actor(case)
        place = actor.topology
        dtype = DTYPES[case["engine_dtype"]] if "engine_dtype" in case else None
        engine = PlainEngine(case["engine_tp"], dtype) if place.is_leader else None
        config = PushConfig.model_validate({"bucket_bytes": 30_000, **case.get("push", {})})
        pusher = Pusher(actor, place, config, Path(folder))
        stats = []
        for version in (1, 2):
            change_weights(actor, version)
            stats.append(pusher.push(engine, version))
            weights = exported(actor)
            if engine is not None:
                assert (engine.policy_version, engine.reason) == (version, None)
                assert_holds(engine, weights)
        results.append((stats, pusher.why_full))
        pusher.close()
        if engine is not None:
            engine.close()
        place.close()
    return results


def adapter_cases(cases: list[dict[str, Any]], folder: str) -> list[Any]:
    """Three pushes of each case, then one to an engine that was started again; held are the merged weights, to rounding."""
    results = []
    for case in cases:
        actor = make_actor(case)
        engine = PlainEngine(case["engine_tp"]) if actor.topology.is_leader else None
        config = PushConfig.model_validate({"bucket_bytes": 30_000, **case.get("push", {})})
        pusher = Pusher(actor, actor.topology, config, Path(folder), adapters_alone=True)
        stats = []
        for version in (1, 2, 3, 4):
            change_adapters(actor, version)
            if version == 4 and engine is not None and actor.topology.rank == 0:  # another replica's may go on
                engine.close()
                engine.start()
            stats.append(pusher.push(engine, version))
            weights = exported(actor)
            if engine is not None:
                assert (engine.policy_version, engine.reason) == (version, None)
                assert_holds(engine, weights, within=1e-6)
        results.append((stats, sum(w.nbytes for w in weights.values())))
        pusher.close()
        if engine is not None:
            engine.close()
        actor.topology.close()
    return results


def failures(case: dict[str, Any], folder: str) -> None:
    """Every way a push can go wrong is caught on the leader, and the next push recovers."""
    actor = make_actor(case)
    place = actor.topology
    engine, spare = (PlainEngine(2), PlainEngine(2)) if place.is_leader else (None, None)
    pusher = Pusher(actor, place, PushConfig.model_validate({"bucket_bytes": 20_000, **case["push"]}), Path(folder))

    def good_push(version: int) -> None:
        change_weights(actor, version)
        assert pusher.push(engine, version).mode == "sharded"
        weights = exported(actor)
        if engine is not None:
            assert (engine.policy_version, engine.reason) == (version, None)
            assert_holds(engine, weights)

    def bad_push(match: str) -> None:
        if engine is None:
            pusher.push(engine, 99)
            return
        with pytest.raises(ValueError, match=match):
            pusher.push(engine, 99)
        assert engine.reason is not None
        assert engine.policy_version != 99

    good_push(1)
    # A byte that changes on its way, in the middle of the third bucket.
    if engine is not None:
        outlet = pusher._link.channel.outlet
        message, calls = outlet.message, []

        def corrupting(slot: int, sections: Any) -> dict[str, Any]:
            calls.append(slot)
            if len(calls) == 3:
                outlet.slots[slot][sections[min(sections)].offset + 8] ^= 64
            return message(slot, sections)

        outlet.message = corrupting
    bad_push(r"other bytes arrived than were sent of 'model\.")
    good_push(2)
    # A tensor that a rank forgets to send.
    lane = pusher._link.lanes[0]
    forgotten = next(move.tensor for moves in lane.own for move in moves)
    if engine is not None:
        lane.own = tuple(tuple(move for move in moves if move.tensor != forgotten) for moves in lane.own)
    bad_push(f"other bytes arrived than were sent of .*'{lane.plan.specs[forgotten].name}'")
    good_push(3)
    # A pusher that is gone in the middle: another one finds workers that wait for more.
    if engine is not None:
        channel = pusher._link.channel
        channel.begin(whole=False)
        channel.free_slot()
        channel.send(lane.plan.buckets[0].sections)
        channel.free_slot()
    pusher.close()
    pusher = Pusher(actor, place, pusher.config, Path(folder))
    good_push(4)
    # A worker that is gone: refused until there is a whole engine again.
    if engine is not None:
        engine.processes[1].kill()
        engine.processes[1].join()
    with pytest.raises(ValueError, match="a worker is gone"):  # there is no plan for it: nobody can go on
        pusher.push(engine, 99)
    if engine is not None:
        engine.close()
        engine = spare
    good_push(5)
    pusher.close()
    if engine is not None:
        engine.close()
    place.close()


def peak_bytes(case: dict[str, Any], folder: str) -> dict[str, int]:
    """Memory of this rank above what it held, at the worst moment of a push."""
    actor = make_actor(case)
    place = actor.topology
    engine = PlainEngine(2) if place.is_leader else None
    pusher = Pusher(actor, place, PushConfig(bucket_bytes=case["bucket_bytes"], mode="sharded"), Path(folder))
    pusher.push(engine, 1)  # names, plan, connection
    before = _reset_peak()
    for version in (2, 3):
        pusher.push(engine, version)
    peak = _status("VmHWM") - before
    pusher.close()
    if engine is not None:
        engine.close()
    place.close()
    return {"peak": peak, "model": sum(p.nbytes for chunk in actor.policy.chunks for p in chunk.parameters())}


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

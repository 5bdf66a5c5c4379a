"""Trainer ranks that push adapters to vLLM engines; run by test_adapters.py in processes of their own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_gcpo.cluster import platform, topology
from megatron_gcpo.config.records import ClusterConfig, LoraConfig, ModelConfig, PushConfig, TrainConfig
from megatron_gcpo.credit.tokens import demonstration_batch
from megatron_gcpo.policy.actor import Actor
from megatron_gcpo.policy.build import build
from megatron_gcpo.reshard import push_adapters
from megatron_gcpo.reshard.channel import Channel
from megatron_gcpo.reshard.check import GapLimit
from megatron_gcpo.reshard.pusher import Pusher
from megatron_gcpo.reshard.verified import verified_push
from megatron_gcpo.rollout.engine import Sampling
from tests.dist.reshard_ranks import change_adapters
from tests.vllm.push_ranks import decoded, exported, hf_values
from tests.vllm.tiny import PROMPTS, requests, rollout_config

POSITIONS = 256


def make_actor(case: dict[str, Any], cpu: Any) -> Actor:
    cluster = ClusterConfig.model_validate({"platform": "cpu", **case["sizes"]})
    place = topology.init(cluster, cpu)
    model = ModelConfig(hf_config=hf_values(case["family"]), dtype=case["dtype"], lora=LoraConfig(**case["lora"]))
    policy = build(model, cluster, cpu, seed=0)
    train = TrainConfig.model_validate({"optimizer": {"lr": 1e-3}})
    return Actor(policy, place, train, temperature=1.0, total_updates=10)


def make_engine(actor: Actor, case: dict[str, Any], *, takes_adapters: bool) -> Any:
    from megatron_gcpo.rollout.vllm.inprocess import VllmEngine

    rollout = rollout_config(vllm={"tensor_parallel_size": case["engine_tp"], "kv_cache_gib": 0.03125})
    lora = LoraConfig(**case["lora"]) if takes_adapters else None
    return VllmEngine(
        actor.policy.hf_config, rollout, dtype=case["dtype"], max_positions=POSITIONS, cpu=True, lora=lora
    )


def push_cases(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Per case: pushes of alternating adapters, and what the engine decodes after each; on leaders."""
    cpu = platform.install("cpu")
    results = []
    for case in cases:
        actor = make_actor(case, cpu)
        leads = actor.topology.is_leader
        config = PushConfig.model_validate({"bucket_bytes": 60_000})
        pusher = Pusher(actor, actor.topology, config, Path(folder), adapters_alone=True)
        engine = make_engine(actor, case, takes_adapters=True) if leads else None
        result: dict[str, Any] = {"pushes": []}
        for version, seed in enumerate((1, 2, 1), start=1):
            change_adapters(actor, seed)
            record(result["pushes"], actor, pusher, engine, version)
        probe = demonstration_batch([([3, 9, 4], [7, 33, 40, 5]), ([2], [8, 8, 1])])
        limit = GapLimit(max=case["limit"], mean=case["limit"])
        result["verified"] = verified_push(actor, pusher, engine, probe, temperature=1.0, limit=limit, version=10)
        if case.get("failures"):
            failures(actor, pusher, engine, result)
        if case.get("in_flight"):
            in_flight(actor, pusher, engine, result)
        if engine is not None:  # vLLM's groups must end before the trainer's
            engine.close()
        if case.get("merged"):
            merged(actor, pusher, case, folder, result)
        pusher.close()
        actor.topology.close()
        results.append(result)
    return results


def merged(actor: Actor, pusher: Pusher, case: dict[str, Any], folder: str, result: dict[str, Any]) -> None:
    """The adapters of the last of ``pushes``, pushed to an engine that takes none: merged; alone they are refused."""
    engine = make_engine(actor, case, takes_adapters=False) if actor.topology.is_leader else None
    plain = Pusher(actor, actor.topology, pusher.config, Path(folder))
    change_adapters(actor, 1)
    stats = plain.push(engine, 3)
    result["merged"] = {"stats": stats, "decoded": decoded(engine)} if engine is not None else None
    with pytest.raises(ValueError, match=r"not started to take adapters.*rollout.vllm.lora=false"):
        pusher.push(engine)
    plain.close()
    if engine is not None:
        with pytest.raises(ValueError, match="the weights are unfit: the last push failed"):
            decoded(engine)
        engine.close()


def record(pushes: list[dict[str, Any]], actor: Actor, pusher: Pusher, engine: Any, version: int) -> None:
    stats, weights = pusher.push(engine, version), exported(actor)
    if engine is not None:
        pushes.append({"stats": stats, "decoded": decoded(engine), "weights": weights})


def bad_push(pusher: Pusher, engine: Any, match: str) -> None:
    if engine is None:
        pusher.push(None, 50)
        return
    with pytest.raises(ValueError, match=match):
        pusher.push(engine, 50)
    with pytest.raises(ValueError, match="the weights are unfit: the last push failed"):
        decoded(engine)


def failures(actor: Actor, pusher: Pusher, engine: Any, result: dict[str, Any]) -> None:
    """What goes wrong on the way or is wrong from the start stops service; the next push of adapters alone repairs it."""
    result["repaired"] = []
    good = push_adapters.export_adapters

    def changed(edit: Any) -> Any:
        return lambda policy: (pair for name, tensor in good(policy) if (pair := edit(name, tensor)) is not None)

    def last(name: str) -> bool:
        return "layers.1.mlp.down_proj.lora_B" in name

    for edit, match in (
        (lambda n, t: None if last(n) else (n, t), "the adapter on model.layers.1.mlp.down_proj came without its B"),
        (lambda n, t: (n, t[:-1] if last(n) else t), r"the adapter on model.layers.1.mlp.down_proj is .* takes"),
        (lambda n, t: (n, t[:, :-1] if last(n) else t), "model.layers.1.mlp.down_proj is not of rank"),
        (lambda n, t: (n.replace("1.mlp", "7.mlp"), t), "the engine has no adapter on model.layers.7.mlp"),
        (lambda n, t: ("model.norm.weight", t[0]) if last(n) else (n, t), "weights came in a push of adapters alone"),
    ):
        push_adapters.export_adapters = changed(edit)
        bad_push(pusher, engine, match)
        push_adapters.export_adapters = good
        record(result["repaired"], actor, pusher, engine, 51)
    send = Channel.send

    def corrupting(self: Channel, sections: Any, extra: Any = None) -> None:
        self.outlet.slots[self._num_sent % 2][8] ^= 64
        send(self, sections, extra)

    Channel.send = corrupting
    bad_push(pusher, engine, r"other bytes arrived than were sent of 'model\.layers.*lora")
    Channel.send = send
    change_adapters(actor, 3)
    record(result["repaired"], actor, pusher, engine, 52)
    # other weights below: served without the adapters, and the next push brings the right ones again
    weights = exported(actor)
    if engine is not None:
        engine.load_weights(iter(weights.items()), version=60)
        result["replaced"] = {"decoded": decoded(engine), "weights": weights}
    result["after_replaced"] = []
    record(result["after_replaced"], actor, pusher, engine, 61)


def in_flight(actor: Actor, pusher: Pusher, engine: Any, result: dict[str, Any]) -> None:
    """A push between two tokens of a sequence: each token is drawn by the adapters of its version."""
    old, answers = exported(actor), []
    wanted = requests(PROMPTS[:3], new=120)
    if engine is not None:
        engine.pause()
        thread = threading.Thread(target=lambda: answers.extend(engine.generate(wanted, Sampling())))
        thread.start()
        for _ in range(30):  # score takes steps for all, also during a pause
            engine.score([((1,), (2,))])
    change_adapters(actor, 4)
    pusher.push(engine, 70)
    new = exported(actor)
    if engine is not None:
        assert not answers
        engine.resume()
        thread.join(120)
        result["in_flight"] = {
            "old": old,
            "new": new,
            "samples": [(s.token_ids, s.logprobs, np.asarray(s.versions_T) == 70) for s in answers],
        }

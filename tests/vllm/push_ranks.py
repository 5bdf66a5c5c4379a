"""Trainer ranks that push to vLLM engines; run by test_push.py in processes of their own (tests.dist.harness)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from megatron_gcpo.cluster import platform, topology
from megatron_gcpo.config.records import ClusterConfig, ModelConfig, PushConfig, TrainConfig
from megatron_gcpo.policy.actor import Actor
from megatron_gcpo.policy.build import build
from megatron_gcpo.reshard.pusher import Pusher
from megatron_gcpo.rollout.engine import Sampling
from tests.dist.reshard_ranks import change_weights
from tests.vllm.tiny import CONFIGS, PROMPTS, SHAPE, requests, rollout_config

POSITIONS = 128
FAMILIES = {
    **CONFIGS,
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**{**SHAPE, "hidden_size": 128}, tie_word_embeddings=False),
}
exported_on_leader: dict[str, torch.Tensor] = {}


def hf_values(family: str) -> dict[str, Any]:
    return FAMILIES[family].to_dict()


def make_actor(family: str, dtype: str, sizes: dict[str, Any], cpu: Any) -> tuple[Actor, Any]:
    cluster = ClusterConfig.model_validate({"platform": "cpu", **sizes})
    place = topology.init(cluster, cpu)
    model = ModelConfig(hf_config=hf_values(family), dtype=dtype)
    policy = build(model, cluster, cpu, seed=0)
    train = TrainConfig.model_validate({"optimizer": {"lr": 1e-3}})
    return Actor(policy, place, train, temperature=1.0, total_updates=10), place


def exported(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: tensor.float().clone() for name, tensor in actor.export()}


def decoded(engine: Any) -> list[tuple[list[int], list[float]]]:
    samples = engine.generate(requests(new=12), Sampling(top_k=1))
    pairs = [(prompt, sample.token_ids) for prompt, sample in zip(PROMPTS, samples, strict=True)]
    scores = engine.score(pairs)
    assert all(set(s.versions_T.tolist()) == {engine.policy_version} for s in samples)
    return [(np.asarray(ids).tolist(), score.tolist()) for (_, ids), score in zip(pairs, scores, strict=True)]


def push_cases(cases: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """Per case: three pushes of alternating weights, and what the engine decodes after each; on leaders."""
    from megatron_gcpo.rollout.vllm.inprocess import VllmEngine

    cpu = platform.install("cpu")
    results = []
    for case in cases:
        exported_on_leader.clear()
        actor, place = make_actor(case["family"], case["dtype"], case["sizes"], cpu)
        engine = None
        if place.is_leader:
            rollout = rollout_config(vllm={"tensor_parallel_size": case["engine_tp"], "kv_cache_gib": 0.03125})
            engine = VllmEngine(actor.policy.hf_config, rollout, dtype=case["dtype"], max_positions=POSITIONS, cpu=True)
        config = PushConfig.model_validate({"bucket_bytes": 60_000, **case.get("push", {})})
        pusher = Pusher(actor, place, config, Path(folder))
        pushes = []
        for version, seed in enumerate((1, 2, 1), start=1):
            change_weights(actor, seed)
            stats = pusher.push(engine, version)
            weights = exported(actor)
            if engine is not None:
                pushes.append({"stats": stats, "why_full": pusher.why_full, "decoded": decoded(engine)})
                pushes[-1]["weights"] = weights
                exported_on_leader.update(weights)
        if case.get("failures"):
            failures(actor, pusher, engine, kill=case["engine_tp"] > 1)
        pusher.close()
        if engine is not None:  # vLLM's groups must end before the trainer's
            engine.close()
        place.close()
        results.append({"pushes": pushes})
    return results


def failures(actor: Actor, pusher: Pusher, engine: Any, *, kill: bool) -> None:
    """A byte that changes on its way, a push that stops in the middle, a worker that is gone: caught, and recovered."""
    link = pusher._link
    assert link is not None
    if engine is not None:
        outlet = link.channel.outlet
        message = outlet.message

        def corrupting(slot: int, sections: Any) -> dict[str, Any]:
            outlet.message = message
            outlet.slots[slot][sections[min(sections)].offset + 8] ^= 64
            return message(slot, sections)

        outlet.message = corrupting
        with pytest.raises(ValueError, match=r"other bytes arrived than were sent of 'model\."):
            pusher.push(engine, 50)
        with pytest.raises(ValueError, match="other bytes arrived"):
            decoded(engine)
    else:
        pusher.push(engine, 50)
    assert pusher.push(engine, 51).mode == "sharded"
    link = pusher._link
    if engine is not None:
        assert len(decoded(engine)) == len(PROMPTS)
        link.channel.begin(whole=False)  # and then its process is gone
        link.channel.free_slot()
        link.channel.send(link.lanes[0].plan.buckets[0].sections)
        link.channel.free_slot()
    pusher.close()
    assert pusher.push(engine, 52).mode == "sharded"
    if engine is not None:
        weights = [(name, tensor) for name, tensor in exported_on_leader.items() if "k_proj" not in name]
        with pytest.raises(ValueError, match=r"nothing was sent for a part of .*qkv_proj"):
            engine.load_weights(iter(weights))
    assert pusher.push(engine, 53).mode == "sharded"
    if engine is not None:
        assert len(decoded(engine)) == len(PROMPTS)
    if kill:
        if engine is not None:
            victims = [w["process"].rpartition(":")[2] for w in engine.control.rpc("gcpo_describe")]
            os.kill(int(victims[1]), signal.SIGKILL)
        with pytest.raises(ValueError, match=r"worker failed|worker is gone"):
            pusher.push(engine, 54)
        if engine is not None:
            with pytest.raises(ValueError, match="weights"):
                decoded(engine)

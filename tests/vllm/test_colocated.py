"""vLLM beside a trainer: in one process with Megatron and its process groups, and in tensor-parallel workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from megatron_gcpo.rollout.engine import Sampling
from tests.dist.harness import run_ranks
from tests.vllm.tiny import CONFIGS, assert_holds, checkpoint, random_model, requests, rollout_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def start(family: str, tp: int = 1):
    from megatron_gcpo.rollout.vllm.inprocess import VllmEngine

    rollout = rollout_config(vllm={"tensor_parallel_size": tp})
    return VllmEngine(CONFIGS[family], rollout, dtype="fp32", max_positions=128, cpu=True)


def leader_hosts_an_engine() -> dict[str, bool]:
    """On each of two ranks, with Megatron imported and its CPU platform installed; only rank 0 has an engine."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    from megatron_gcpo.cluster import topology
    from megatron_gcpo.cluster.platform import install
    from megatron_gcpo.config.records import ClusterConfig

    ranks = topology.init(
        ClusterConfig(platform="cpu", processes_per_node=2, tensor_model_parallel_size=2), install("cpu")
    )
    world, devices = dist.group.WORLD, torch.cuda.current_device()
    engine = start("tied") if ranks.is_leader else None
    found = {
        "the world is the trainer's": dist.group.WORLD is world and dist.get_world_size() == 2,
        "the CPU platform is in place": torch.cuda.current_device() == devices == torch.device("cpu"),
    }
    for seed in (0, 1):
        if engine is not None:
            engine.load_weights(checkpoint(random_model("tied", seed)))
            assert_holds(engine, random_model("tied", seed), 1e-4)
        # a new group of both ranks: its name must be the same on a rank that made vLLM's groups and on one that did not
        group = dist.new_group([0, 1])
        summed = torch.ones(1)
        dist.all_reduce(summed, group=group)
        found[f"collectives after push {seed}"] = summed.item() == 2
    model_parallel_cuda_manual_seed(0)
    with get_cuda_rng_tracker().fork():
        found["random states fork"] = torch.rand(1).shape == (1,)
    if engine is not None:
        engine.close()
    dist.barrier()
    ranks.close()
    return found


def test_in_the_process_of_a_trainer_of_two_ranks(tmp_path: Path) -> None:
    for found in run_ranks(__file__, "leader_hosts_an_engine", 2, {}, tmp_path):
        assert all(found.values()), found


def test_tensor_parallel_workers_beside_this_process() -> None:
    engine = start("untied", tp=2)
    assert engine.control is not None
    assert engine.control.num_workers == 2
    for seed in (0, 1, 0):
        model = random_model("untied", seed)
        engine.load_weights(checkpoint(model))
        assert_holds(engine, model, 1e-4)
    with pytest.raises(ValueError, match="a vLLM worker failed in no_such_method"):
        engine.control.rpc("no_such_method")
    workers = [p for p in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(p.cmdline())]
    assert len(workers) == 2, f"got {len(workers)} worker processes, expected 2"
    os.kill(workers[-1].pid, signal.SIGKILL)
    workers[-1].wait(30)
    with pytest.raises(ValueError, match="vLLM failed while serving"):
        engine.generate(requests(new=100), Sampling())
    with pytest.raises(ValueError, match="start the run again, it resumes"):
        engine.generate(requests(), Sampling())
    with pytest.raises(ValueError, match="a vLLM worker failed in gcpo_describe"):
        engine.control.rpc("gcpo_describe")
    engine.close()

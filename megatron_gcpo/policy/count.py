"""How many parameters each rank will hold, known without starting a process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_gcpo.cluster.grid import expert_tensor_parallel_size, rank_grid, replica_size, validate
from megatron_gcpo.cluster.platform import Platform
from megatron_gcpo.config.records import ClusterConfig, ModelConfig
from megatron_gcpo.policy.build import prints_to_log
from megatron_gcpo.policy.provider import make_provider, read_causal_lm


def count_parameters(model: ModelConfig, cluster: ClusterConfig, platform: Platform) -> list[int]:
    """Parameters held by each rank, in rank order; a copy of a tied embedding on another stage counts there too.

    Builds, without memory for its weights, what one rank of every pipeline stage would hold: the other axes cut every
    tensor into equal parts. No process group may be initialised in this process.

    Raises ValueError for a model or a layout that ``build`` would refuse.
    """
    validate(cluster)
    _, provider = make_provider(model, cluster, platform, read_causal_lm(model))
    one = _smallest(cluster)
    counts: dict[int, int] = {}
    for place in rank_grid(one):
        if place.pp in counts:
            continue
        with _standing_at(place.rank, one), prints_to_log():
            chunks = provider.provide_distributed_model(
                wrap_with_ddp=False,
                use_cpu_initialization=provider.use_cpu_initialization,
                init_model_with_meta_device=True,
            )
        counts[place.pp] = sum(p.numel() for chunk in chunks for p in chunk.parameters())
    return [counts[place.pp] for place in rank_grid(cluster)]


def _smallest(cluster: ClusterConfig) -> ClusterConfig:
    """The same cuts on as few processes as they allow: more replicas hold nothing new."""
    stages = cluster.pipeline_model_parallel_size
    expert_ranks = expert_tensor_parallel_size(cluster) * cluster.expert_model_parallel_size
    processes = stages * math.lcm(replica_size(cluster) // stages, expert_ranks)
    return cluster.model_copy(update={"num_nodes": 1, "processes_per_node": processes})


@contextmanager
def _standing_at(rank: int, cluster: ClusterConfig) -> Iterator[None]:
    """Megatron's process groups as this rank would see them, with nobody at the other end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend that it is for

    assert not dist.is_initialized(), "got a process that is a rank already, expected one outside of any run"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=cluster.processes_per_node)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=cluster.tensor_model_parallel_size,
            pipeline_model_parallel_size=cluster.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=cluster.virtual_pipeline_model_parallel_size,
            context_parallel_size=cluster.context_parallel_size,
            expert_model_parallel_size=cluster.expert_model_parallel_size,
            expert_tensor_parallel_size=cluster.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

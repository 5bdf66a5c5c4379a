"""How many parameters each rank will hold, known without starting a process."""

from __future__ import annotations

import math

import torch

from megatron_gcpo.cluster.grid import expert_tensor_parallel_size, rank_grid, replica_size, validate
from megatron_gcpo.cluster.platform import Platform
from megatron_gcpo.config.records import ClusterConfig, ModelConfig
from megatron_gcpo.policy import lora
from megatron_gcpo.policy.provider import check_runs, make_provider, read_causal_lm
from megatron_gcpo.policy.skeleton import standing_at, weightless_chunks


def count_parameters(model: ModelConfig, cluster: ClusterConfig, platform: Platform) -> list[int]:
    """Parameters held by each rank, in rank order; a copy of a tied embedding on another stage counts there too.

    Builds, without memory for its weights, what one rank of every pipeline stage would hold: the other axes cut every
    tensor into equal parts. No process group may be initialised in this process.

    Raises ValueError for a model or a layout that ``build`` would refuse.
    """
    validate(cluster)
    hf_config = read_causal_lm(model)
    check_runs(hf_config, cluster, platform)
    _, provider = make_provider(model, cluster, platform, hf_config)
    one = smallest(cluster)
    counts: dict[int, int] = {}
    for place in rank_grid(one):
        if place.pp in counts:
            continue
        with standing_at(place.rank, one):
            chunks = weightless_chunks(provider)
            if model.lora is not None:
                with torch.device("meta"):
                    chunks = lora.adapt(model.lora)(chunks)
        counts[place.pp] = sum(p.numel() for chunk in chunks for p in chunk.parameters())
    return [counts[place.pp] for place in rank_grid(cluster)]


def smallest(cluster: ClusterConfig) -> ClusterConfig:
    """The same cuts on as few processes as they allow: more replicas hold nothing new."""
    stages = cluster.pipeline_model_parallel_size
    expert_ranks = expert_tensor_parallel_size(cluster) * cluster.expert_model_parallel_size
    processes = stages * math.lcm(replica_size(cluster) // stages, expert_ranks)
    return cluster.model_copy(update={"num_nodes": 1, "processes_per_node": processes})

"""Exact parameter counts of every pipeline stage under a layout, from the real Megatron model on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gcpo.cluster.grid import expert_tensor_parallel_size, num_replicas, rank_grid, world_size
from megatron_gcpo.cluster.platform import Platform
from megatron_gcpo.config.records import ClusterConfig, ModelConfig
from megatron_gcpo.plan.shape import Shape, read_shape
from megatron_gcpo.policy.count import smallest
from megatron_gcpo.policy.provider import make_provider, read_causal_lm
from megatron_gcpo.policy.skeleton import standing_at, weightless_chunks


@dataclass(frozen=True, kw_only=True)
class StageParameters:
    """Elements that one rank of a pipeline stage holds."""

    stage: int
    dense: int
    """Replicated over data-parallel ranks."""
    expert: int
    """Replicated over expert-data-parallel ranks."""

    @property
    def total(self) -> int:
        return self.dense + self.expert


def count_stages(
    model: ModelConfig, cluster: ClusterConfig, platform: Platform
) -> tuple[Shape, tuple[StageParameters, ...]]:
    """The model's shape and, per pipeline stage, what one of its ranks holds; all ranks of a stage hold equally much.

    Raises ValueError for a model or a layout that training would refuse.
    """
    _, provider = make_provider(model, cluster, platform, read_causal_lm(model))
    one = smallest(cluster)
    stages: dict[int, StageParameters] = {}
    for place in rank_grid(one):
        if place.pp in stages:
            continue
        with standing_at(place.rank, one):
            named = [pair for chunk in weightless_chunks(provider) for pair in chunk.named_parameters()]
        expert = sum(p.numel() for name, p in named if ".experts." in name)
        dense = sum(p.numel() for _, p in named) - expert
        stages[place.pp] = StageParameters(stage=place.pp, dense=dense, expert=expert)
    return read_shape(provider), tuple(stages[pp] for pp in sorted(stages))


def expert_replicas(cluster: ClusterConfig) -> int:
    """Ranks on which the optimizer state of an expert is spread; without expert parallelism, those of the dense layers."""
    if cluster.expert_model_parallel_size == 1:
        return dense_replicas(cluster)
    per_stage = world_size(cluster) // cluster.pipeline_model_parallel_size
    return per_stage // (expert_tensor_parallel_size(cluster) * cluster.expert_model_parallel_size)


def dense_replicas(cluster: ClusterConfig) -> int:
    """Ranks that hold the same dense weights: data-parallel times context-parallel."""
    return num_replicas(cluster) * cluster.context_parallel_size

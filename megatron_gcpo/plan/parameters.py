"""Exact parameter counts of every pipeline stage under a layout, from the real Megatron model on the meta device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_gcpo.cluster.grid import expert_tensor_parallel_size, num_replicas, rank_grid, world_size
from megatron_gcpo.cluster.platform import Platform
from megatron_gcpo.config.records import ClusterConfig, ModelConfig
from megatron_gcpo.plan.shape import Shape, read_shape
from megatron_gcpo.policy import lora
from megatron_gcpo.policy.count import smallest
from megatron_gcpo.policy.hf_config import PLACES_LAYERS
from megatron_gcpo.policy.provider import make_provider, read_causal_lm
from megatron_gcpo.policy.skeleton import standing_at, weightless_chunks

LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class StageParameters:
    """Elements that one rank of a pipeline stage holds."""

    stage: int
    dense: int
    """Replicated over data-parallel ranks."""
    expert: int
    """Replicated over expert-data-parallel ranks."""
    layers: int
    moe_layers: int
    """Of ``layers``, those with experts."""
    trained_dense: int
    """Of ``dense``, what has a gradient: all of it, or adapters."""
    trained_expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert

    @property
    def trained(self) -> int:
        return self.trained_dense + self.trained_expert


def count_stages(
    model: ModelConfig, cluster: ClusterConfig, platform: Platform
) -> tuple[Shape, tuple[StageParameters, ...]]:
    """The model's shape and, per pipeline stage, what one of its ranks holds; all ranks of a stage hold equally much.

    Raises ValueError for a model or a layout that training would refuse.
    """
    _, provider = make_provider(model, cluster, platform, read_causal_lm(model))
    shape, one = read_shape(provider), smallest(cluster)
    stages: dict[int, StageParameters] = {}
    alike = shape.num_moe_layers in (0, shape.num_layers) and not PLACES_LAYERS & model.megatron.keys()
    for place in rank_grid(one):
        if place.pp in stages:
            continue
        if alike and 1 < place.pp < cluster.pipeline_model_parallel_size - 1:  # a middle stage like the one before
            stages[place.pp] = replace(stages[place.pp - 1], stage=place.pp)
            continue
        with standing_at(place.rank, one):
            chunks = weightless_chunks(provider)
            if model.lora is not None:
                with torch.device("meta"):
                    chunks = lora.adapt(model.lora)(chunks)
            stages[place.pp] = _count(place.pp, chunks)
    return shape, tuple(stages[pp] for pp in sorted(stages))


def _count(stage: int, chunks: Sequence[Any]) -> StageParameters:
    named = [(c, name, p) for c, chunk in enumerate(chunks) for name, p in chunk.named_parameters()]
    expert = [p for _, name, p in named if ".experts." in name]
    dense = [p for _, name, p in named if ".experts." not in name]
    layers = {(c, found[0]): False for c, name, _ in named if (found := LAYER.findall(name))}
    layers |= {(c, found[0]): True for c, name, _ in named if ".experts." in name and (found := LAYER.findall(name))}
    return StageParameters(
        stage=stage,
        dense=sum(p.numel() for p in dense),
        expert=sum(p.numel() for p in expert),
        layers=len(layers),
        moe_layers=sum(layers.values()),
        trained_dense=sum(p.numel() for p in dense if p.requires_grad),
        trained_expert=sum(p.numel() for p in expert if p.requires_grad),
    )


def expert_replicas(cluster: ClusterConfig) -> int:
    """Ranks on which the optimizer state of an expert is spread; without expert parallelism, those of the dense layers."""
    if cluster.expert_model_parallel_size == 1:
        return dense_replicas(cluster)
    per_stage = world_size(cluster) // cluster.pipeline_model_parallel_size
    return per_stage // (expert_tensor_parallel_size(cluster) * cluster.expert_model_parallel_size)


def dense_replicas(cluster: ClusterConfig) -> int:
    """Ranks that hold the same dense weights: data-parallel times context-parallel."""
    return num_replicas(cluster) * cluster.context_parallel_size

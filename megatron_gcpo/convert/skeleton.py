"""What a model's parameters are called on both sides and how each is stored, learned from a model without memory.

A Megatron model of one process is built on the meta device. megatron-bridge says which Hugging Face tensors make each of
its parameters and how; Megatron-Core says under which key and where in the global tensor each parameter is stored. Both
are then applied to one real parameter at a time. A second model, of one rank of each stage of the wanted layout, says how
finely that layout cuts the global tensors and which stage holds which layer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model
from transformers import PretrainedConfig

from megatron_gcpo.cluster.grid import rank_grid
from megatron_gcpo.cluster.platform import Platform
from megatron_gcpo.config.records import ClusterConfig, ModelConfig
from megatron_gcpo.convert.torch_dist import Box
from megatron_gcpo.policy.count import smallest
from megatron_gcpo.policy.provider import make_provider
from megatron_gcpo.policy.skeleton import standing_at, weightless_chunks
from megatron_gcpo.policy.weights import SHARDING

LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A box of a global tensor."""

    key: str
    shape: tuple[int, ...]
    """Of the global tensor."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    """With the leading ones of stacked layers and experts."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of the Megatron model of one process."""

    name: str
    shape: tuple[int, ...]
    keeps_fp32: bool
    """Whatever the model's dtype is."""
    mapping: Any
    """The bridge's translation of this parameter."""
    task: Any
    """The bridge's conversion task around it."""
    stored: Any
    """ShardedTensor or ShardedTensorFactory, without data."""
    parts: tuple[Part, ...]

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a parameter's value, each of its part's size."""
        return [t.reshape(p.size) for t, p in zip(_leaves(self.stored, tensor), self.parts, strict=True)]

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The value of a parameter from those of its parts."""
        if not isinstance(self.stored, ShardedTensorFactory):
            return tensors[0].reshape(self.shape)
        rest = iter(tensors)
        built: Any = replace(self.stored, data=torch.empty(self.shape, device="meta")).build()

        def value(leaf: ShardedTensor) -> torch.Tensor:
            return next(rest).reshape(leaf.local_shape)

        merged: Any = dict_list_map_inplace(value, built)
        return self.stored.merge_fn(merged)

    @property
    def layer(self) -> int | None:
        """Its transformer layer, from 0; None: before or after all layers."""
        found = LAYER.search(self.name)
        return int(found[1]) if found else None


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that must be translated together: one, or all experts of a tensor that Hugging Face keeps fused."""

    parameters: tuple[Parameter, ...]
    grouped: bool

    @property
    def layer(self) -> int | None:
        return self.parameters[0].layer

    @property
    def position(self) -> tuple[int, int]:
        """Sorts units as Hugging Face files have them: embedding, layers, the rest."""
        if self.layer is not None:
            return 1, self.layer
        return (0 if "embedding" in self.parameters[0].name else 2), 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a cluster cuts the global tensors."""

    cuts: dict[str, tuple[int, ...]]
    """Of each key, the size of a rank's box; absent: as one process has it."""
    stages: dict[int, int]
    """Of each layer, the pipeline stage that holds it; absent: the first."""
    num_stages: int

    def stage(self, unit: Unit) -> int:
        if unit.layer is not None:
            return self.stages.get(unit.layer, 0)
        return 0 if unit.position[0] == 0 else self.num_stages - 1

    def boxes(self, part: Part) -> Iterator[Box]:
        """The pieces in which a part is written: those of the regular grid that the layout lays over the tensor."""
        cut = self.cuts.get(part.key, part.size)
        boxes: list[Box] = [((), ())]
        for begin, length, step in zip(part.offset, part.size, cut, strict=True):
            edges = [begin, *range((begin // step + 1) * step, begin + length, step), begin + length]
            boxes = [((*offset, a), (*size, b - a)) for offset, size in boxes for a, b in itertools.pairwise(edges)]
        return iter(boxes)


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """All that translating a model needs, for as long as ``open_skeleton`` is open."""

    bridge: Any
    """megatron-bridge's translator of this architecture."""
    hf_config: PretrainedConfig
    units: tuple[Unit, ...]
    objects: tuple[str, ...]
    """Keys of the empty per-layer objects that a model asks a checkpoint for."""
    model: Any
    """The Megatron model of one process; its parameters have no memory."""

    def hold_on_cpu(self) -> None:
        """Until this is called only meta tensors can be translated, which says names and shapes; afterwards only real ones.

        The bridge moves some tensors to where the model's parameters are. They go to the CPU, still without memory: one
        element seen from every index.
        """
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                element = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
                setattr(module, name, torch.nn.Parameter(element, requires_grad=False))

    def to_megatron(self, parameter: Parameter, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The parameter's value from Hugging Face tensors. Raises KeyError for a tensor that is not there."""
        source = self.bridge.maybe_modify_loaded_hf_weight(parameter.mapping.hf_param, tensors)
        return parameter.mapping.hf_to_megatron(source, parameter.task.megatron_module)

    def to_hf(self, unit: Unit, values: Iterator[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Hugging Face tensors by name from the values of the unit's parameters, taken one at a time."""
        merged: dict[str, torch.Tensor] = {}
        buffers: dict[str, dict[int, torch.Tensor]] = {}
        for parameter, value in zip(unit.parameters, values, strict=True):
            translated = parameter.mapping.megatron_to_hf(value, parameter.task.megatron_module)
            if unit.grouped:
                complete = self.bridge._accumulate_grouped_export(
                    parameter.task, translated, self.model.config, buffers, {}
                )
                merged.update(complete or {})
            else:
                merged.update(self.bridge.maybe_modify_converted_hf_weight(parameter.task, translated, {}))
        assert not buffers, f"got experts of {sorted(buffers)} left over, expected whole groups"
        return merged


@contextmanager
def open_skeleton(hf_config: PretrainedConfig, platform: Platform) -> Iterator[Skeleton]:
    """The skeleton of a model; no process group may be initialised in this process.

    Raises ValueError when the architecture or one of its parameters is unknown to megatron-bridge.
    """
    one = ClusterConfig(platform=platform.name)
    auto_bridge, provider = make_provider(_any_model(hf_config), one, platform, hf_config)
    with standing_at(0, one):
        model = unwrap_model(weightless_chunks(provider))[0]
        bridge = auto_bridge._model_bridge
        tasks = bridge.build_conversion_tasks(hf_config, [model])
        # Some of its translators look the config up in a checkpoint.
        bridge.hf_pretrained = SimpleNamespace(config=hf_config)
        stored = model.sharded_state_dict(metadata=dict(SHARDING))
        parameters = [_parameter(task, stored) for task in _whole(tasks, model, hf_config)]
        yield Skeleton(
            bridge=bridge,
            hf_config=hf_config,
            units=tuple(_units(parameters)),
            objects=tuple(o.unique_key for o in stored.values() if isinstance(o, ShardedObject)),
            model=model,
        )


def read_layout(
    hf_config: PretrainedConfig, cluster: ClusterConfig, platform: Platform, megatron: Mapping[str, Any]
) -> Layout:
    """How the cluster cuts this model. Raises ValueError when it cannot.

    megatron: TransformerConfig options, as of model.megatron (uneven stages).
    """
    one = smallest(cluster)
    num_stages = cluster.pipeline_model_parallel_size
    if one.processes_per_node == 1:
        return Layout(cuts={}, stages={}, num_stages=1)
    model = _any_model(hf_config).model_copy(update={"megatron": dict(megatron)})
    _, provider = make_provider(model, cluster, platform, hf_config)
    cuts: dict[str, tuple[int, ...]] = {}
    stages: dict[int, int] = {}
    seen: set[int] = set()
    for place in rank_grid(one):
        if place.pp in seen:
            continue
        seen.add(place.pp)
        with standing_at(place.rank, one):
            for chunk in unwrap_model(weightless_chunks(provider)):
                stages |= {layer.layer_number - 1: place.pp for layer in chunk.decoder.layers}
                for value in chunk.sharded_state_dict(metadata=dict(SHARDING)).values():
                    cuts |= {part.key: part.size for part in _parts(value)}
    return Layout(cuts=cuts, stages=stages, num_stages=num_stages)


def _any_model(hf_config: PretrainedConfig) -> ModelConfig:
    return ModelConfig(hf_config={"model_type": hf_config.model_type}, dtype="bf16")


def _whole(tasks: Sequence[Any], model: Any, hf_config: PretrainedConfig) -> list[Any]:
    """The tasks, of which each parameter must have one; a tied output layer is the embedding."""
    translated = {task.param_name for task in tasks if task is not None}
    tied = model.share_embeddings_and_output_weights
    unknown = sorted(
        name
        for name, _ in model.named_parameters()
        if name not in translated and not (tied and name == "output_layer.weight")
    )
    if unknown:
        raise ValueError(
            f"megatron-bridge does not know how to translate {unknown[0]} of {hf_config.model_type} models"
            + (f", nor {len(unknown) - 1} more parameters" if len(unknown) > 1 else "")
        )
    return [task for task in tasks if task is not None]


def _parameter(task: Any, stored: Mapping[str, Any]) -> Parameter:
    sharded = stored[task.param_name]
    return Parameter(
        name=task.param_name,
        shape=tuple(task.param_weight.shape),
        keeps_fp32=task.param_weight.dtype == torch.float32,
        mapping=task.mapping,
        task=task,
        stored=sharded,
        parts=_parts(sharded),
    )


def _parts(sharded: Any) -> tuple[Part, ...]:
    if isinstance(sharded, ShardedObject):
        return ()
    return tuple(
        Part(
            key=leaf.key,
            shape=tuple(leaf.global_shape),
            offset=tuple(leaf.global_offset),
            size=(1,) * leaf.prepend_axis_num + tuple(leaf.local_shape),
        )
        for leaf in _built(sharded, torch.empty_like(sharded.data, device="meta"))
    )


def _leaves(sharded: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    leaves: list[Any] = _built(sharded, tensor)
    return [leaf.data for leaf in leaves]


def _built(sharded: Any, tensor: torch.Tensor) -> list[ShardedTensor]:
    if isinstance(sharded, ShardedTensorFactory):
        return list(nested_values(replace(sharded, data=tensor).build()))
    return [replace(sharded, data=tensor, dtype=tensor.dtype)]


def _units(parameters: Sequence[Parameter]) -> Iterator[Unit]:
    groups: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        # The bridge's own protocol: experts whose tensors Hugging Face keeps in one.
        grouped = getattr(parameter.mapping, "is_grouped_export", False)
        groups.setdefault(f"group {parameter.mapping.group_key}" if grouped else parameter.name, []).append(parameter)
    for name, members in groups.items():
        yield Unit(parameters=tuple(members), grouped=name.startswith("group "))

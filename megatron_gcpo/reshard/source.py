"""Which boxes of which Hugging Face tensors this rank's parameters hold, read off the bridge's own mappings.

Names and layouts are the bridge's. A mapping that does more than cutting and joining, or that this file does not know, is a
reason not to push shards: ``Unsliceable`` says which, and the push falls back to whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_gcpo.policy.model import Policy, unwrapped
from megatron_gcpo.reshard.boxes import Box
from megatron_gcpo.reshard.gather import VOCABULARY_TENSORS


class Unsliceable(ValueError):
    """The trainer's shards are no boxes of Hugging Face tensors."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Part of a Hugging Face tensor within a parameter of this rank."""

    name: str
    shape: tuple[int, ...]
    """Of the whole Hugging Face tensor."""
    box: Box
    corner: tuple[int, ...]
    """Where the box starts within the parameter."""


@dataclass(frozen=True, kw_only=True)
class LocalShards:
    """What this rank holds."""

    parameters: tuple[torch.Tensor, ...]
    """Megatron's own objects: what the optimizer writes is what is read."""
    held: tuple[tuple[int, Held], ...]
    """(index of the parameter, what is in it), in the order of the export."""


def local_shards(policy: Policy) -> LocalShards:
    """Collective over the pipeline ranks. Raises Unsliceable, not necessarily on every rank."""
    if policy.adapters is not None:
        raise Unsliceable("adapters are merged into the weights on their way out")
    model_bridge = policy.bridge._model_bridge
    checkpoint = policy.bridge.hf_pretrained
    tasks = model_bridge.build_conversion_tasks(checkpoint, list(unwrapped(policy)))
    state = checkpoint.state if hasattr(checkpoint, "state") else {}
    parameters: list[torch.Tensor] = []
    held: list[tuple[int, Held]] = []
    for task in tasks:
        if task is None or task.param_weight is None:
            continue
        parts = held_by(task.mapping, task.param_weight, task.megatron_module, policy)
        _require_unchanged(model_bridge, task, parts, state)
        held += [(len(parameters), part) for part in parts]
        parameters.append(task.param_weight)
    return LocalShards(parameters=tuple(parameters), held=tuple(held))


def _require_unchanged(model_bridge: Any, task: Any, parts: Sequence[Held], state: Any) -> None:
    """Bridges may touch what they export: this one is shown tensors without data, and must hand them back as they are."""
    shown = {part.name: torch.empty(part.shape, dtype=task.param_weight.dtype, device="meta") for part in parts}
    changed = f"{type(model_bridge).__name__} changes {task.global_param_name} on its way to Hugging Face"
    try:
        returned = model_bridge.maybe_modify_converted_hf_weight(task, dict(shown), state)
    except (RuntimeError, NotImplementedError) as error:  # it wanted the numbers
        raise Unsliceable(changed) from error
    if returned.keys() != shown.keys() or any(returned[name] is not shown[name] for name in shown):
        raise Unsliceable(changed)


def held_by(mapping: Any, parameter: torch.Tensor, module: Any, policy: Policy) -> list[Held]:
    """What one parameter holds. Raises Unsliceable for a mapping that is more than slices."""
    from megatron.bridge.models.conversion import param_mapping as known

    shape, rank, size = tuple(parameter.shape), mapping.tp_rank, mapping.tp_size
    kind = type(mapping)
    if kind is known.GatedMLPMapping:
        half = shape[0] // 2
        names = (mapping.hf_param["gate"], mapping.hf_param["up"])
        return [
            row_share(name, (half, *shape[1:]), rank, size, corner=index * half) for index, name in enumerate(names)
        ]
    if kind is known.QKVMapping:
        if mapping._tp_mapping._detect_parallelism_type(module) != "column":
            raise Unsliceable(f"{mapping.megatron_param} is a QKV projection that is not cut by rows")
        if module.config.attention_output_gate:
            raise Unsliceable(f"{mapping.megatron_param} has an output gate between queries and keys")
        return qkv_share(mapping.hf_param, shape, rank, size, module.config)
    cut = _cut_of(mapping, module, known)
    name = mapping.hf_param
    if cut == "column":
        return [row_share(name, shape, rank, size, true_rows=_true_rows(name, policy))]
    if cut == "row" and len(shape) == 2:
        return [column_share(name, shape, rank, size)]
    whole = tuple((0, length) for length in shape)
    return [Held(name=name, shape=shape, box=whole, corner=(0,) * len(shape))]


def _cut_of(mapping: Any, module: Any, known: Any) -> str:
    kinds = {
        known.ColumnParallelMapping: "column",
        known.RowParallelMapping: "row",
        known.ReplicatedMapping: "replicated",
        known.DirectMapping: "replicated",
    }
    kind = type(mapping)
    if kind is known.AutoMapping and mapping.permute_dims is None:
        return mapping._detect_parallelism_type(module)
    if kind not in kinds:
        raise Unsliceable(f"{mapping.megatron_param} goes through {kind.__name__}, which may be more than slices")
    return kinds[kind]


def _true_rows(name: str, policy: Policy) -> int | None:
    return policy.vocab_size if name.endswith(VOCABULARY_TENSORS) else None


def row_share(
    name: str, shape: Sequence[int], rank: int, size: int, *, corner: int = 0, true_rows: int | None = None
) -> Held:
    """A share of the rows; rows past ``true_rows`` are padding, which no Hugging Face tensor has."""
    num_rows = shape[0]
    total = num_rows * size if true_rows is None else true_rows
    first = min(rank * num_rows, total)
    box = ((first, min(first + num_rows, total)), *((0, length) for length in shape[1:]))
    return Held(name=name, shape=(total, *shape[1:]), box=box, corner=(corner, *(0 for _ in shape[1:])))


def column_share(name: str, shape: Sequence[int], rank: int, size: int) -> Held:
    """A share of the columns."""
    num_rows, columns = shape
    box = ((0, num_rows), (rank * columns, (rank + 1) * columns))
    return Held(name=name, shape=(num_rows, columns * size), box=box, corner=(0, 0))


def qkv_share(names: Any, shape: Sequence[int], rank: int, size: int, config: Any) -> list[Held]:
    """Rows of all ranks together: per KV group its queries, its key, its value. A rank has a run of them.

    With fewer KV groups than ranks such a run begins or ends inside a group.
    """
    head = config.kv_channels or config.hidden_size // config.num_attention_heads
    groups = config.num_query_groups or config.num_attention_heads
    queries = config.num_attention_heads // groups * head
    heads = {"q": queries, "k": head, "v": head}
    start, stop = rank * shape[0], (rank + 1) * shape[0]
    rest = tuple((0, length) for length in shape[1:])
    held = []
    place = 0
    for group in range(groups):
        for part, length in heads.items():
            first, last = max(place, start), min(place + length, stop)
            if first < last:
                row = group * length + first - place
                held.append(
                    Held(
                        name=names[part],
                        shape=(groups * length, *shape[1:]),
                        box=((row, row + last - first), *rest),
                        corner=(first - start, *(0 for _ in rest)),
                    )
                )
            place += length
    return held

"""Weights from a distributed checkpoint (torch_dist) that plain Megatron-Core, or a trainer built on it, wrote.

Such a checkpoint says what its tensors are called and how large they are, and nothing of the model; so those are what is
compared. The same weight has had several names: layers of Transformer Engine keep the norm before a matrix under the
matrix's name, and a tensor may hold one layer or all of them. Either is found. The vocabulary may be padded by another
size. Files are opened by readers that run nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_gcpo.convert import torch_dist
from megatron_gcpo.convert.torch_dist import GlobalTensor

ALIASES = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)
"""Where Megatron-Core's layers and Transformer Engine's keep the same norm."""
WEIGHTS = ("embedding.", "decoder.", "output_layer.")
"""How the names of a language model's weights begin; the rest of a checkpoint is optimizer and run state."""
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a shard lies in the checkpoint."""

    tensor: GlobalTensor
    offset: tuple[int, ...]
    size: tuple[int, ...]


def load(path: Path, state: Mapping[str, Mapping[str, Any]], vocab_size: int) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's part of a model, on the CPU, in the checkpoint's dtype. Collective over all ranks.

    Args:
        path: from ``source.find_foreign``.
        state: ``weights.model_state`` of the model: where its tensors lie in the whole ones.
        vocab_size: true size; a checkpoint with fewer rows is of another model.

    Raises:
        ValueError: on all ranks, when a tensor is missing, is left over or has another shape (the first are named), or when
            files are damaged.
    """
    found = torch_dist.read_tensors(path)
    shards = {
        (part, name): shard
        for part, tensors in state.items()
        for name, shard in tensors.items()
        if isinstance(shard, ShardedTensor | ShardedTensorFactory)
    }
    places = {key: [_place(piece, found) for piece in _pieces(shard)] for key, shard in shards.items()}
    problems = [
        problem
        for key, shard in shards.items()
        for piece, place in zip(_pieces(shard), places[key], strict=True)
        if (problem := _problem(piece, place, vocab_size))
    ]
    used = {place.tensor.key for several in places.values() for place in several if place is not None}
    _agree(path, problems, used, set(found))
    loaded: dict[str, dict[str, torch.Tensor]] = {part: {} for part in state}
    for (part, name), shard in shards.items():
        pieces = zip(_pieces(shard), places[part, name], strict=True)
        values = [_read(piece, place) for piece, place in pieces if place is not None]
        whole: Any = shard.merge_fn(values) if isinstance(shard, ShardedTensorFactory) else values[0]  # type: ignore[arg-type]
        loaded[part][name] = whole
    return loaded


def _pieces(shard: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """What a shard is stored as: itself, or the halves of a gated matrix."""
    if isinstance(shard, ShardedTensor):
        return [shard]
    built: Any = shard.build()
    assert isinstance(built, list), f"got {type(built)} for {shard.key}, expected a list of its parts"
    return built


def _place(piece: ShardedTensor, found: Mapping[str, GlobalTensor]) -> Place | None:
    """Either program may keep every layer's tensor by itself, or all layers as one tensor with the layer as its first axis."""
    offset = tuple(piece.global_offset)
    size = (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
    key = piece.key
    if _is_stacked(piece):
        key = key.replace(".layers.", f".layers.{offset[0]}.", 1)
        offset, size = offset[1:], size[1:]
    for name in _names(key):
        if name in found:
            return Place(tensor=found[name], offset=offset, size=size)
        layer = re.search(r"\.layers\.(\d+)\.", name)
        stacked = name.replace(layer[0], ".layers.", 1) if layer else name
        if layer and stacked in found and int(layer[1]) < found[stacked].shape[0]:
            return Place(tensor=found[stacked], offset=(int(layer[1]), *offset), size=(1, *size))
    return None


def _is_stacked(piece: ShardedTensor) -> bool:
    return re.search(r"\.layers\.(?!\d)", piece.key) is not None


def _names(key: str) -> Iterator[str]:
    yield key
    for ours, theirs in ALIASES:
        yield key.replace(ours, theirs)
        yield key.replace(theirs, ours)


def _problem(piece: ShardedTensor, place: Place | None, vocab_size: int) -> str | None:
    ours = tuple(piece.global_shape)[1 if _is_stacked(piece) else 0 :]
    if place is None:
        return f"{piece.key} is not in it"
    theirs = place.tensor.shape
    if len(place.size) > len(ours):  # all layers in one tensor
        theirs = theirs[1:]
    padded = piece.allow_shape_mismatch and theirs[1:] == ours[1:] and theirs[0] >= vocab_size
    if theirs == ours or padded:
        return None
    return f"{place.tensor.key} is {list(theirs)} there and {list(ours)} here"


def _agree(path: Path, problems: list[str], used: set[str], found: set[str]) -> None:
    """Raise the same error on all ranks when any of them has one, or nobody wants some of the checkpoint's weights."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (problems, used))
    everywhere = list(dict.fromkeys(problem for theirs, _ in gathered for problem in theirs))
    wanted = {key for _, keys in gathered for key in keys}
    left = sorted(key for key in found - wanted if key.startswith(WEIGHTS))
    if not everywhere and not left:
        return
    everywhere += [f"{key} is in it and not in the model" for key in left]
    more = f" and {len(everywhere) - _SHOWN} more" if len(everywhere) > _SHOWN else ""
    raise ValueError(
        f"model.start_from: the checkpoint {path} is of another model: {'; '.join(everywhere[:_SHOWN])}{more}. Set "
        "model.path or model.hf_config to that model"
    )


def _read(piece: ShardedTensor, place: Place) -> torch.Tensor:
    """The piece, its rows beyond the end of a vocabulary that is padded less filled with zeros."""
    missing = 0
    size = place.size
    if piece.allow_shape_mismatch:
        rows = max(0, min(size[0], place.tensor.shape[0] - place.offset[0]))
        missing, size = size[0] - rows, (rows, *size[1:])
    if size[0] == 0:
        return torch.zeros(piece.local_shape, dtype=place.tensor.dtype)
    value = torch_dist.read_box(place.tensor, (place.offset, size))
    if missing:
        value = torch.cat([value, value.new_zeros(missing, *size[1:])])
    return value.reshape(piece.local_shape)

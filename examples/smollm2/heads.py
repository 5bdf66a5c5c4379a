"""Attention heads that do nothing, so that an odd number of them can be cut over two tensor-parallel ranks.

SmolLM2-135M has 9 query heads in 3 key-value groups. A fourth group of zeros makes it 12 in 4: its values are zero, so it
adds nothing to the output; the rows of the output projection that would read it are zero, so no gradient reaches it, and
(without weight decay on anything but zeros) it stays zero through training and can be taken off again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import LlamaConfig


def pad_heads(
    state: Mapping[str, torch.Tensor], config: LlamaConfig, multiple: int
) -> tuple[dict[str, torch.Tensor], LlamaConfig]:
    """(weights, config) of the same function with key-value groups rounded up to a multiple.

    Args:
        state: the tensors of a Llama checkpoint by name.
        multiple: of the number of key-value heads; query heads follow, as many per group as before.
    """
    groups = -(-_num_groups(config) // multiple) * multiple
    return _resized(state, config, groups)


def strip_heads(
    state: Mapping[str, torch.Tensor], config: LlamaConfig, groups: int
) -> tuple[dict[str, torch.Tensor], LlamaConfig]:
    """The opposite: keep the first ``groups`` key-value heads. Raises ValueError when a head to be dropped does anything."""
    kept, narrow = _resized(state, config, groups)
    padded, _ = _resized(kept, narrow, _num_groups(config))
    for name, tensor in state.items():
        # A dropped query or key head may hold anything as long as its values and its output are zero.
        if name.endswith(("v_proj.weight", "o_proj.weight")) and not torch.equal(padded[name], tensor):
            raise ValueError(f"{name} is not zero in the heads beyond {groups} key-value heads: they cannot be dropped")
    return kept, narrow


def _num_groups(config: LlamaConfig) -> int:
    return config.num_key_value_heads or config.num_attention_heads


def _resized(
    state: Mapping[str, torch.Tensor], config: LlamaConfig, groups: int
) -> tuple[dict[str, torch.Tensor], LlamaConfig]:
    per_group = config.num_attention_heads // _num_groups(config)
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    sizes = {
        "q_proj.weight": (0, groups * per_group * head_dim),
        "k_proj.weight": (0, groups * head_dim),
        "v_proj.weight": (0, groups * head_dim),
        "o_proj.weight": (1, groups * per_group * head_dim),
    }
    result = {}
    for name, tensor in state.items():
        axis, size = next((sizes[end] for end in sizes if name.endswith(end)), (0, tensor.shape[0]))
        result[name] = _fit(tensor, axis, size)
    values = {**config.to_dict(), "num_attention_heads": groups * per_group, "num_key_value_heads": groups}
    return result, LlamaConfig(**values)


def _fit(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Cut or filled with zeros at the end of one axis."""
    if size <= tensor.shape[axis]:
        return tensor.narrow(axis, 0, size).clone()
    shape = list(tensor.shape)
    shape[axis] = size - tensor.shape[axis]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)

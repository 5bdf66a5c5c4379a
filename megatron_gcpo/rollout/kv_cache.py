"""The embedded engine's key-value cache, and an attention that reads it without copying.

Two things dominate decoding of small models in transformers: the dynamic cache concatenates (copies) all keys and
values at every token, and grouped-query attention repeats them once per query head. Here tokens are written into a
preallocated slab, and the query heads that share a key-value head are passed to the attention kernel as if they were
successive queries of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION_NAME = "gcpo_grouped_decode"
MIN_GROWTH_TOKENS = 64


class SlabLayer(CacheLayerMixin):
    """Keys and values of a layer: [N, heads, capacity, head size], of which the first ``length`` tokens are filled."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append these tokens; returns views of all tokens so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            self._grow(end)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grow(self, needed: int) -> None:
        # the first block holds the prompts exactly: they are expanded to their samples before the first growth
        capacity = needed if self.length == 0 else max(needed + MIN_GROWTH_TOKENS, needed * 3 // 2)
        capacity = max(needed, min(capacity, self.max_tokens))

        def grown(old: torch.Tensor) -> torch.Tensor:
            new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
            new[:, :, : self.length] = old[:, :, : self.length]
            return new

        self.keys, self.values = grown(self.keys), grown(self.values)

    def select_rows(self, rows: torch.Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return self.max_tokens


class SlabCache(Cache):
    """One slab per layer, and the additive mask [N, 1, 1, max_tokens] that hides left padding (None: no padding)."""

    def __init__(self, *, num_layers: int, max_tokens: int, pad_bias: torch.Tensor | None) -> None:
        self._slabs = [SlabLayer(max_tokens) for _ in range(num_layers)]
        super().__init__(layers=[*self._slabs])
        self.pad_bias = pad_bias

    @property
    def length(self) -> int:
        return self._slabs[0].length

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep these rows in this order; a row may be kept several times (the samples of one prompt)."""
        for slab in self._slabs:
            slab.select_rows(rows)
        if self.pad_bias is not None:
            self.pad_bias = self.pad_bias.index_select(0, rows)


def grouped_decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token per row; anything longer goes to transformers' own SDPA.

    query [N, H, 1, d], key and value [N, H_kv, T, d]; returns [N, 1, H, d]. Query head h reads key-value head
    h // (H / H_kv), so the heads of a group are adjacent and a reshape makes them H / H_kv queries of that head.
    """
    num_rows, num_heads, num_queries, head_size = query.shape
    num_kv_heads = key.shape[1]
    if num_queries != 1 or num_heads == num_kv_heads:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_size)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(num_rows, 1, num_heads, value.shape[3]), None


AttentionInterface.register(ATTENTION_NAME, grouped_decode_attention)

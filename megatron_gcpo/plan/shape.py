"""The sizes of a model that arithmetic needs, read from Megatron's own configuration of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder; sizes in elements, over all ranks."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Hidden units of a dense feed-forward layer."""
    vocab: int
    gated: bool
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Hidden units of the shared expert."""
    num_moe_layers: int = 0

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def attention_weights(self) -> int:
        """Elements of one layer's attention projections."""
        return self.hidden * (2 * self.query + 2 * self.key_value)

    @property
    def dense_weights(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def active_expert_weights(self) -> int:
        """Elements of a MoE layer's feed-forward part that one token meets, router and shared expert included."""
        width = self.experts_per_token * self.expert_ffn + self.shared_ffn
        return (3 if self.gated else 2) * self.hidden * width + self.hidden * self.num_experts

    @property
    def kv_bytes_per_token(self) -> int:
        """Of a bf16 cache, over all layers."""
        return 2 * 2 * self.key_value * self.num_layers


def read_shape(provider: Any) -> Shape:
    """The shape of a finalised provider (policy.provider.make_provider).

    Raises:
        ValueError: multi-head latent attention, whose arithmetic is another one.
    """
    if provider.multi_latent_attention:
        raise ValueError("the planner knows multi-head and grouped-query attention, not latent attention (MLA)")
    experts = provider.num_moe_experts or 0
    pattern = provider.moe_layer_freq
    if not experts:
        moe_layers = 0
    elif isinstance(pattern, int):
        moe_layers = sum(layer % pattern == 0 for layer in range(provider.num_layers))
    else:
        moe_layers = sum(map(bool, pattern))
    return Shape(
        num_layers=provider.num_layers,
        hidden=provider.hidden_size,
        heads=provider.num_attention_heads,
        kv_heads=provider.num_query_groups or provider.num_attention_heads,
        head_dim=provider.kv_channels,
        ffn=provider.ffn_hidden_size,
        vocab=provider.vocab_size,
        gated=provider.gated_linear_unit,
        num_experts=experts,
        experts_per_token=provider.moe_router_topk if experts else 0,
        expert_ffn=(provider.moe_ffn_hidden_size or provider.ffn_hidden_size) if experts else 0,
        shared_ffn=provider.moe_shared_expert_intermediate_size or 0,
        num_moe_layers=moe_layers,
    )

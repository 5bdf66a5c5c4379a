"""The sizes of a model that arithmetic needs, read from Megatron's own configuration of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): keys and values of all heads from one short vector."""

    query_rank: int
    """Width that queries are compressed to; 0: they are not."""
    kv_rank: int
    rope_dim: int
    """Of each head's query, and of the one key part that carries positions and is shared by all heads."""
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder; sizes in elements, over all ranks."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Of a query: with latent attention both of its parts."""
    ffn: int
    """Hidden units of a dense feed-forward layer."""
    vocab: int
    gated: bool
    tied: bool = False
    """Whether the output layer is the embedding."""
    latent: Latent | None = None
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
    def value(self) -> int:
        """Width of what attention puts out, over all heads."""
        return self.query if self.latent is None else self.heads * self.latent.value_dim

    @property
    def embeddings(self) -> int:
        """Elements of the embedding and the output layer."""
        return (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def attention_weights(self) -> int:
        """Elements of one layer's attention projections."""
        if (latent := self.latent) is None:
            return self.hidden * (2 * self.query + 2 * self.key_value)
        up = self.heads * (self.head_dim - latent.rope_dim + latent.value_dim)
        queries = self.hidden * self.query
        if latent.query_rank:
            queries = latent.query_rank * (self.hidden + self.query)
        keys = self.hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * up
        return queries + keys + self.hidden * self.value

    @property
    def dense_weights(self) -> int:
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def active_expert_weights(self) -> int:
        """Elements of a MoE layer's feed-forward part that one token meets, router and shared expert included."""
        width = self.experts_per_token * self.expert_ffn + self.shared_ffn
        return (3 if self.gated else 2) * self.hidden * width + self.hidden * self.num_experts

    def kv_bytes_per_token(self, engine_tp: int) -> float:
        """Of a bf16 cache on each GPU of an engine, over all layers.

        Heads are shared by the GPUs, and repeated where there are more GPUs than heads; the latent vector is on every one.
        """
        if self.latent is not None:
            return 2 * (self.latent.kv_rank + self.latent.rope_dim) * self.num_layers
        return 2 * 2 * self.key_value * self.num_layers / min(engine_tp, self.kv_heads)


def read_shape(provider: Any) -> Shape:
    """The shape of a finalised provider (policy.provider.make_provider)."""
    latent = None
    if provider.multi_latent_attention:
        latent = Latent(
            query_rank=provider.q_lora_rank or 0,
            kv_rank=provider.kv_lora_rank,
            rope_dim=provider.qk_pos_emb_head_dim,
            value_dim=provider.v_head_dim,
        )
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
        head_dim=provider.kv_channels if latent is None else provider.qk_head_dim + latent.rope_dim,
        ffn=provider.ffn_hidden_size,
        vocab=provider.vocab_size,
        gated=provider.gated_linear_unit,
        tied=provider.share_embeddings_and_output_weights,
        latent=latent,
        num_experts=experts,
        experts_per_token=provider.moe_router_topk if experts else 0,
        expert_ffn=(provider.moe_ffn_hidden_size or provider.ffn_hidden_size) if experts else 0,
        shared_ffn=provider.moe_shared_expert_intermediate_size or 0,
        num_moe_layers=moe_layers,
    )

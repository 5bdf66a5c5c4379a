"""Sentence embeddings of what a rollout did: which span, which encoder, and for whom it is worth computing them."""

from megatron_gcpo.embed.encoder import Encoder
from megatron_gcpo.embed.groups import cosine_metrics, embed_groups
from megatron_gcpo.embed.span import embedded_span

__all__ = ["Encoder", "cosine_metrics", "embed_groups", "embedded_span"]

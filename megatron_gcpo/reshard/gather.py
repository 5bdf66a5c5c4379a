"""The simple way from Megatron's shards to Hugging Face tensors: every rank gathers every tensor, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from megatron_gcpo.policy.model import Policy

VOCABULARY_TENSORS = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of tensors with one row per vocabulary id."""


def export_hf(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor) in the policy's dtype, on its device. Collective: exhaust it on every rank.

    Padding of the vocabulary is cut off; a tied output layer is not repeated. One tensor is gathered at a time.
    """
    tied = policy.hf_config.tie_word_embeddings
    # The mapping of names is made anew on every call: kept from an earlier one it could outlive the tensors it points to.
    for name, tensor in policy.bridge.export_hf_weights(policy.chunks, cpu=False, show_progress=False):
        if tied and name == "lm_head.weight":
            continue
        if name.endswith(VOCABULARY_TENSORS):
            tensor = tensor[: policy.vocab_size]
        yield name, tensor.detach()


def buckets(tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Consecutive tensors in lists of at most ``bucket_bytes`` (a larger tensor has a list of its own).

    Tensors are copied, so that a bucket stays valid while the next ones are gathered.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.clone()))
        size += tensor.nbytes
    if bucket:
        yield bucket

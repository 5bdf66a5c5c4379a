"""The simple way from Megatron's shards to Hugging Face tensors: every rank gathers every tensor, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_gcpo.policy.model import Policy

VOCABULARY_TENSORS = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of tensors with one row per vocabulary id."""


def export_hf(policy: Policy, *, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor) in the policy's dtype, on its device. Collective: exhaust it on every rank.

    Padding of the vocabulary is cut off; a tied output layer is not repeated. One tensor is gathered at a time.

    merged: with the adapters, where there are some; else the weights below them.
    """
    tied = policy.hf_config.tie_word_embeddings
    # The mapping of names is made anew on every call: kept from an earlier one it could outlive the tensors it points to.
    for exported, tensor in policy.bridge.export_hf_weights(
        policy.chunks, cpu=False, show_progress=False, merge_adapter_weights=merged
    ):
        name = exported.replace(".base_layer.", ".")  # so the bridge marks a matrix whose adapter it leaves out
        if tied and name == "lm_head.weight":
            continue
        if name.endswith(VOCABULARY_TENSORS):
            tensor = tensor[: policy.vocab_size]
        yield name, tensor.detach()

"""A Megatron-Core model on this rank, as the rest of the trainer holds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from megatron_gcpo.cluster.platform import Platform
from megatron_gcpo.config.records import LoraConfig


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters that are trained instead of the model's own weights (lora.py)."""

    config: LoraConfig
    base: str
    """Identifies the frozen weights below them (lora.fingerprint)."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model on this rank, and what one needs to run and export it."""

    chunks: list[Any]
    """One per virtual pipeline stage of this rank: GPTModel in its wrappers, DistributedDataParallel outermost."""
    bridge: Any
    """megatron-bridge's AutoBridge of this architecture."""
    hf_config: PretrainedConfig
    provider: Any
    """The TransformerConfig the chunks share."""
    platform: Platform
    vocab_size: int
    """True size, without the padding that makes it divisible."""
    adapters: Adapters | None = None
    """None: all weights are trained."""

    @property
    def dtype(self) -> torch.dtype:
        return self.provider.params_dtype

    @property
    def device(self) -> torch.device:
        return self.platform.device

    @property
    def packs_thd(self) -> bool:
        """Whether attention is told of sequence boundaries (Transformer Engine) rather than given a mask."""
        return self.platform.name == "cuda"


def unwrapped(policy: Policy) -> Iterator[Any]:
    """The GPTModel of each chunk, without its data-parallel and precision wrappers."""
    for chunk in policy.chunks:
        module: Any = chunk.module
        while hasattr(module, "module"):
            module = module.module
        yield module

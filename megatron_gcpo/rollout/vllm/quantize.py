"""Quantised engines: what vLLM is told, and what becomes of the weights on the way to it.

fp8: weights travel in the trainer's precision; vLLM quantises what arrives, one scale per output channel on a CPU and one
per tensor on CUDA, and the activations while it computes.
int8: weights travel quantised, with their scales beside them (the compressed-tensors format W8A8, symmetric, one scale per
output channel; activations per token, while computing).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

INT8_MAX = 127


def online_quantization(kind: str, *, cpu: bool) -> str | None:
    """vLLM's ``quantization`` argument: what it does to weights that arrive in full precision."""
    if kind != "fp8":
        return None
    return "fp8_per_channel" if cpu else "fp8"


def checkpoint_quantization(kind: str) -> dict[str, Any] | None:
    """The ``quantization_config`` of a model whose weights arrive quantised (compressed-tensors), None for others."""
    if kind != "int8":
        return None
    shared = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**shared, "strategy": "channel", "dynamic": False},
                "input_activations": {**shared, "strategy": "token", "dynamic": True},
            }
        },
    }


def quantized(weights: Iterable[tuple[str, torch.Tensor]], kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream of checkpoint tensors as an engine of this kind takes it; one tensor at a time."""
    for name, tensor in weights:
        if kind == "int8" and is_linear(name, tensor):
            integers, scales = to_int8(tensor)
            yield name, integers
            yield name.removesuffix("weight") + "weight_scale", scales
        else:
            yield name, tensor


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """Whether a checkpoint tensor is the matrix of a layer that is quantised: not an embedding, head or router."""
    return (
        tensor.ndim == 2
        and name.endswith("_proj.weight")
        and not name.endswith(("embed_tokens.weight", "lm_head.weight"))
    )


def to_int8(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric rounding to int8, one scale per output channel.

    Returns:
        [O, I] int8 and [O, 1] float32 scales such that integers * scales is nearest to the weight.
    """
    largest_O1 = weight_OI.float().abs().amax(dim=1, keepdim=True)
    scales_O1 = (largest_O1 / INT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    integers_OI = (weight_OI.float() / scales_O1).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return integers_OI, scales_O1

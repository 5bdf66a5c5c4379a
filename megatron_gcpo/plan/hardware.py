"""What a GPU can do, from its maker's data sheet, and the shares of it that a run is assumed to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU in a node of eight with NVLink inside and one network port of its own."""

    name: str
    memory_bytes: float
    """Usable, in bytes: what the driver leaves of the nominal size."""
    flops: float
    """Dense bf16 tensor-core FLOP per second."""
    memory_bandwidth: float
    """Bytes per second of its own memory."""
    link_bandwidth: float
    """Bytes per second in one direction to the GPUs of its node."""
    network_bandwidth: float
    """Bytes per second in one direction to other nodes."""


GPUS: Mapping[str, Gpu] = {
    "h100": Gpu(
        name="h100",
        memory_bytes=79.1 * GIB,
        flops=989e12,
        memory_bandwidth=3.35e12,
        link_bandwidth=450e9,
        network_bandwidth=50e9,
    ),
    "h200": Gpu(
        name="h200",
        memory_bytes=139.8 * GIB,
        flops=989e12,
        memory_bandwidth=4.8e12,
        link_bandwidth=450e9,
        network_bandwidth=50e9,
    ),
    "b200": Gpu(
        name="b200",
        memory_bytes=178.0 * GIB,
        flops=2250e12,
        memory_bandwidth=8.0e12,
        link_bandwidth=900e9,
        network_bandwidth=100e9,
    ),
}
GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the data sheet that are assumed; measure your own and pass them."""

    train: float = 0.40
    """Of ``flops``, in forward and backward passes of dense layers."""
    experts: float = 0.25
    """Of ``flops``, in the smaller products of a mixture of experts."""
    prefill: float = 0.50
    """Of ``flops``, while an engine reads prompts."""
    decode: float = 0.60
    """Of ``memory_bandwidth``, while an engine draws tokens."""
    copy: float = 0.70
    """Of link and network bandwidth."""
    reserve: float = 0.08
    """Of the memory, left to CUDA contexts, communication buffers and fragmentation."""

"""What both ends of a push of adapters agree on.

Names are PEFT's without its prefix: that of the Hugging Face matrix, then ``.lora_A.weight`` or ``.lora_B.weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ENDS = (".lora_A.weight", ".lora_B.weight")
"""Of the name of every tensor of an adapter, and of no other."""


@dataclass(frozen=True, kw_only=True)
class AdapterPush:
    """What an engine's workers are told of a push of adapters (arXiv 2106.09685: W + alpha / rank x B A)."""

    base: str
    """Identifies the weights below (policy.lora.fingerprint)."""
    rank: int
    alpha: int
    alone: bool
    """Whether the workers hold those weights already; else they come in the same push."""


def split[T](tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """(the model's own, the adapters'), by name."""
    own = {name: value for name, value in tensors.items() if not name.endswith(ENDS)}
    return own, {name: value for name, value in tensors.items() if name.endswith(ENDS)}

"""vLLM's own low-rank adapters: how an engine is started for them, and how a request names the one in force."""

from __future__ import annotations

from typing import Any

from megatron_gcpo.config.checks import LORA_TARGETS
from megatron_gcpo.config.records import LoraConfig

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes that vLLM makes room for."""
ADAPTER_ID = 1
"""There is one: the policy's."""


def adapter_arguments(lora: LoraConfig) -> dict[str, Any]:
    """Fields of vLLM's EngineArgs for one adapter of this kind; JSON values.

    Raises ValueError for a rank that vLLM has no room for.
    """
    room = next((rank for rank in RANKS if rank >= lora.rank), None)
    if room is None:
        raise ValueError(
            f"vLLM takes adapters of a rank up to {RANKS[-1]}, got {lora.rank}: lower model.lora.rank, or set "
            "rollout.vllm.lora=false"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": room,
        "lora_target_modules": [name for target in lora.target_modules for name in LORA_TARGETS[target]],
    }


def adapter_request() -> Any:
    """A LoRARequest: what a request says to be answered with the adapter that the workers adopted.

    Its path is never read: the workers have the adapter before any request comes.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="policy", lora_int_id=ADAPTER_ID, lora_path="pushed by the trainer")

"""What a rollout server must be able to do and must be: the questions an engine asks before it uses one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_gcpo.rollout.vllm.arguments import WORKER_EXTENSION
from megatron_gcpo.rollout.vllm.requests import LOGPROBS_MODE

GENERATE = "/inference/v1/generate"
NEEDED_PATHS = (
    "/health",
    GENERATE,
    "/pause",
    "/resume",
    "/collective_rpc",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/weight_info",
    "/get_world_size",
    "/reset_prefix_cache",
    "/server_info",
)
"""What the engine calls; all of it exists in the tested version when the development endpoints are on."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the configuration says a server is; one that differs would answer another question than the one asked."""

    max_positions: int
    """Tokens of the longest sequence, prompt and completion."""
    dtype: str
    """vLLM's name: float32 or bfloat16."""
    vocab_size: int
    tensor_parallel_size: int
    quantized: bool
    transfer_backend: str
    routed_experts: bool
    """Whether samples must say which experts saw their tokens."""


def differences(info: Any, expected: Expected) -> Iterator[str]:
    """What a server says of itself against what the configuration says of it, one clause each."""
    try:
        config = info["vllm_config"]
        model, parallel = config["model_config"], config["parallel_config"]
        transfer = config["weight_transfer_config"] or {}
        length, mode, dtype = int(model["max_model_len"]), model["logprobs_mode"], str(model["dtype"])
        extension, tp = parallel["worker_extension_cls"], parallel["tensor_parallel_size"]
        quantization, routed = model["quantization"], bool(model.get("enable_return_routed_experts"))
    except (TypeError, KeyError, ValueError) as error:
        yield f"/server_info is not as expected ({type(error).__name__}: {error})"
        return
    if length < expected.max_positions + 1:
        yield (
            f"it holds {length} positions, fewer than the {expected.max_positions} tokens of the longest sequence and one "
            "more (rollout.vllm.max_model_len, data.max_prompt_tokens + rollout.max_new_tokens)"
        )
    if dtype.removeprefix("torch.") != expected.dtype:
        yield f"it computes in {dtype.removeprefix('torch.')}, not in {expected.dtype} (rollout.dtype, model.dtype)"
    if mode != LOGPROBS_MODE:
        yield f"its --logprobs-mode is {mode}, not {LOGPROBS_MODE}"
    if extension != WORKER_EXTENSION:
        yield f"its workers run without --worker-extension-cls {WORKER_EXTENSION}, which receives and verifies weights"
    if transfer.get("backend") != expected.transfer_backend:
        yield f"its --weight-transfer-config has backend {transfer.get('backend')!r}, not {expected.transfer_backend!r}"
    if tp != expected.tensor_parallel_size:
        yield f"it is {tp}-way tensor-parallel, not {expected.tensor_parallel_size} (rollout.vllm.tensor_parallel_size)"
    if (quantization is not None) != expected.quantized:
        yield f"its quantization is {quantization}, not as rollout.quantization says"
    if routed != expected.routed_experts:
        yield f"it {'returns' if routed else 'does not return'} routed experts, unlike what rollout.router_replay says"

"""The arguments of a vLLM engine, by the names of vLLM's EngineArgs, and the model folder that it starts from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from megatron_gcpo.config.records import LoraConfig, RolloutConfig
from megatron_gcpo.rollout.vllm.adapters import adapter_arguments
from megatron_gcpo.rollout.vllm.capabilities import kv_cache_gib
from megatron_gcpo.rollout.vllm.quantize import checkpoint_quantization, online_quantization
from megatron_gcpo.rollout.vllm.requests import LOGPROBS_MODE

WORKER_EXTENSION = "megatron_gcpo.rollout.vllm.worker.WorkerExtension"
TRANSFER = "megatron_gcpo"
"""The name under which the worker extension registers its weight transfer."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def engine_arguments(
    rollout: RolloutConfig,
    *,
    model_folder: Path,
    dtype: str,
    max_positions: int,
    cpu: bool,
    sleeps: bool,
    devices: Sequence[int] = (),
    lora: LoraConfig | None = None,
) -> dict[str, Any]:
    """Fields of vLLM's EngineArgs, JSON values.

    Args:
        model_folder: as ``write_model_folder`` made it.
        dtype: "fp32" or "bf16".
        max_positions: tokens of the longest sequence to generate or to score.
        sleeps: the engine shares its GPU and gives memory back while the trainer works.
        devices: CUDA devices to use, as this process counts them; (): from the first one on.
        lora: adapters that the engine computes beside its weights; None: none.
    """
    settings = rollout.vllm
    arguments: dict[str, Any] = {
        "model": str(model_folder),
        "load_format": "dummy",
        "dtype": DTYPES[dtype],
        # vLLM draws at least one token, also when it only scores a sequence that fills every position
        "max_model_len": max_positions + 1,
        "max_num_seqs": rollout.max_batch_rows,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "skip_tokenizer_init": True,
        "logprobs_mode": LOGPROBS_MODE,
        "seed": 0,
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": TRANSFER},
        "quantization": online_quantization(rollout.quantization, cpu=cpu),
        "enable_return_routed_experts": rollout.router_replay or None,
        **({} if lora is None else adapter_arguments(lora)),
    }
    if cpu:
        arguments["enforce_eager"] = True
    else:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
        arguments["enable_sleep_mode"] = sleeps
        arguments["device_ids"] = list(devices) or None
    if (cache_gib := kv_cache_gib(settings, cpu=cpu)) is not None:
        arguments["kv_cache_memory_bytes"] = int(cache_gib * 2**30)
    return {name: value for name, value in arguments.items() if value is not None} | settings.options


def write_model_folder(hf_config: PretrainedConfig, folder: Path, *, max_positions: int, quantization: str) -> Path:
    """``folder`` with the model's config.json, as vLLM wants it: no weights, no tokenizer.

    The one position more than ``max_positions`` is never computed (``engine_arguments``), but vLLM compares lengths.
    """
    values = dict(hf_config.to_dict())
    values["architectures"] = values.get("architectures") or [architecture(hf_config)]
    values["max_position_embeddings"] = max(values["max_position_embeddings"], max_positions + 1)
    if (quantized := checkpoint_quantization(quantization)) is not None:
        values["quantization_config"] = quantized
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def architecture(hf_config: PretrainedConfig) -> str:
    """Name of the model's class for causal language modelling. Raises ValueError when there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    if name is None:
        raise ValueError(
            f"transformers has no causal language model of type {hf_config.model_type!r}: change the model"
        )
    return name if isinstance(name, str) else name[0]

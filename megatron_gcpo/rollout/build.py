"""Which rollout engine a configuration asks for, and whether a model fits it."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from megatron_gcpo.cluster.grid import num_replicas as num_replicas_of
from megatron_gcpo.cluster.platform import Platform
from megatron_gcpo.config.records import Config, LoraConfig
from megatron_gcpo.methods import longest_sequences, resolve
from megatron_gcpo.policy.options import DTYPES
from megatron_gcpo.rollout.engine import RolloutEngine


def make_engine(
    config: Config, hf_config: PretrainedConfig, platform: Platform, *, replica: int = 0, num_replicas: int = 1
) -> RolloutEngine:
    """The engine of one replica of the trainer; it holds no weights yet.

    Raises ValueError when the engine is not installed, does not take this model, or does not start.
    """
    rollout, dtype = config.rollout, engine_dtype(config)
    # each engine is imported by who chose it: one loads transformers models, one vLLM, one an HTTP client
    if rollout.engine == "transformers":
        options = {
            "device": platform.device,
            "dtype": DTYPES[dtype],
            "max_batch_rows": rollout.max_batch_rows,
            "return_routed_experts": rollout.router_replay and config.run.stage == "rl",
        }
        if rollout.max_policy_lag and config.run.stage == "rl":
            from megatron_gcpo.rollout.engine_process import EngineProcess

            return EngineProcess(hf_config, **options, num_threads=config.cluster.threads_per_process)
        from megatron_gcpo.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(hf_config, **options)
    if rollout.engine == "vllm_server":
        from megatron_gcpo.rollout.vllm.server import ServerEngine

        urls = rollout.vllm.urls[replica::num_replicas]
        return ServerEngine(urls, hf_config, rollout, dtype=dtype, max_positions=max_positions(config))
    from megatron_gcpo.rollout.vllm.inprocess import VllmEngine

    cpu = platform.name == "cpu"
    return VllmEngine(
        hf_config,
        rollout,
        dtype=dtype,
        max_positions=max_positions(config),
        cpu=cpu,
        threads=config.cluster.threads_per_process,
        devices=() if cpu else colocated_devices(config, torch.cuda.current_device(), torch.cuda.device_count()),
        lora=pushed_alone(config),
    )


def check_engine(config: Config, hf_config: PretrainedConfig, *, cpu: bool) -> None:
    """What ``make_engine`` would refuse, as far as it is known before any process starts. Raises ValueError."""
    if config.rollout.engine != "vllm":
        return
    from megatron_gcpo.rollout.vllm import capabilities

    capabilities.check_build(capabilities.installed(), cpu=cpu)
    dtype, longest = engine_dtype(config), max_positions(config)
    capabilities.check_model(
        hf_config, config.rollout, dtype=dtype, max_positions=longest, cpu=cpu, lora=pushed_alone(config)
    )


def pushed_alone(config: Config) -> LoraConfig | None:
    """The adapters that the engine computes beside its weights."""
    return config.model.lora if config.rollout.vllm.lora else None


def colocated_devices(config: Config, own: int, num_visible: int) -> tuple[int, ...]:
    """The GPUs of an engine beside the leader that computes on device ``own``: that one and those that follow.

    Leaders are tensor x context ranks apart (cluster.grid), so that wider engines would share a GPU.

    Raises ValueError when the engine would reach the next leader's, or is wider than what this process sees.
    """
    cluster, width = config.cluster, config.rollout.vllm.tensor_parallel_size
    room = cluster.tensor_model_parallel_size * cluster.context_parallel_size
    if num_replicas_of(cluster) == 1:
        room = num_visible - own
    if width > min(room, num_visible - own):
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size {width} needs {width} GPUs beside the one of each replica's leader, which "
            f"has {min(room, num_visible - own)}: lower it, or give the engines GPUs of their own with "
            "rollout.engine=vllm_server"
        )
    return tuple(range(own, own + width))


def engine_dtype(config: Config) -> str:
    """ "fp32" or "bf16", of the engine's weights and activations."""
    return config.rollout.dtype or config.model.dtype


def max_positions(config: Config) -> int:
    """Tokens of the longest sequence of a vLLM engine: prompt and completion, or a whole conversation."""
    if config.rollout.vllm.max_model_len is not None:
        return config.rollout.vllm.max_model_len
    return max(longest.tokens for longest in longest_sequences(*resolve(config.method), config))

"""From a Hugging Face config to Megatron-Core's TransformerConfig, through megatron-bridge; needs no process groups.

Every setting that the CPU needs is here and in norm.py only. On CUDA the layers are Transformer Engine's and the fusions
the bridge's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_gcpo.cluster.grid import expert_tensor_parallel_size
from megatron_gcpo.cluster.platform import Platform, import_megatron_bridge
from megatron_gcpo.config.records import ClusterConfig, ModelConfig
from megatron_gcpo.policy import options
from megatron_gcpo.policy.hf_config import check_layout, count_experts, read_hf_config

RESERVED = {
    **{
        name: f"cluster.{name}"
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "sequence_parallel",
        )
    },
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "model.dtype"),
    **dict.fromkeys(("calculate_per_token_loss", "variable_seq_lengths"), "the trainer"),
}
"""TransformerConfig options that model.megatron may not set -> who sets them."""

CPU_SETTINGS: dict[str, Any] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "moe_permute_fusion": False,
    "moe_grouped_gemm": False,
    "moe_shared_expert_overlap": False,
    "persist_layer_norm": False,
    "attention_softmax_in_fp32": True,
    "attention_backend": AttnBackend.auto,
    # Heads that predict further tokens are built by Transformer Engine only.
    "mtp_num_layers": None,
}
"""Every fused kernel off; softmax in fp32 as the Hugging Face models have it."""


def read_causal_lm(model: ModelConfig) -> PretrainedConfig:
    """``read_hf_config``, naming its causal-LM class. Raises ValueError also when its model_type has none."""
    config = read_hf_config(model)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{config.model_type!r} is no causal language model of transformers: choose another model")
    if not config.architectures:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def check_runs(hf_config: PretrainedConfig, cluster: ClusterConfig, platform: Platform) -> None:
    """Raises ValueError for a layout that can be built and stored, but in which this platform cannot compute."""
    if platform.name == "cpu" and count_experts(hf_config) and expert_tensor_parallel_size(cluster) > 1:
        raise ValueError(
            "on CPUs the experts cannot be cut over tensor-parallel ranks (gloo gathers only equal sizes): set "
            "cluster.expert_tensor_parallel_size=1"
        )


def make_provider(
    model: ModelConfig, cluster: ClusterConfig, platform: Platform, hf_config: PretrainedConfig
) -> tuple[Any, Any]:
    """(AutoBridge, finalised TransformerConfig of the bridge); needs no process groups.

    Raises ValueError for an unsupported architecture, impossible parallel sizes or unknown options.
    """
    check_layout(hf_config, cluster, model.megatron)
    megatron_bridge = import_megatron_bridge(platform)
    if not megatron_bridge.AutoBridge.supports(hf_config):
        raise ValueError(f"megatron-bridge has no {hf_config.model_type} model: choose another model")
    if model.path is None:
        bridge = megatron_bridge.AutoBridge.from_hf_config(hf_config)
    else:
        bridge = megatron_bridge.AutoBridge.from_hf_pretrained(model.path)
    provider = bridge.to_megatron_provider(load_weights=False)
    dtype = options.DTYPES[model.dtype]
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": cluster.tensor_model_parallel_size,
        "pipeline_model_parallel_size": cluster.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": cluster.virtual_pipeline_model_parallel_size,
        "context_parallel_size": cluster.context_parallel_size,
        "expert_model_parallel_size": cluster.expert_model_parallel_size,
        # Megatron's groups and the bridge have different defaults: the groups decide.
        "expert_tensor_parallel_size": expert_tensor_parallel_size(cluster),
        "sequence_parallel": cluster.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        # Rows of different lengths: stages tell each other the shape of what they send.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # Token weights are global already; what Megatron multiplies besides is undone by scale.loss_factor.
        "calculate_per_token_loss": False,
        # Two interleaved stages cannot tell the messages of one batch of sends and receives apart.
        "overlap_p2p_comm": cluster.virtual_pipeline_model_parallel_size is not None,
        "batch_p2p_comm": cluster.virtual_pipeline_model_parallel_size is None,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 1,
        # All weights are loaded, so none are drawn.
        "perform_initialization": False,
        # The policy gradient alone moves the router unless the run asks for a balancing loss.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        **(_cpu_settings() if platform.name == "cpu" else {}),
        **options.checked("model.megatron", model.megatron, type(provider), RESERVED),
    }
    for name, value in settings.items():
        setattr(provider, name, value)
    try:
        provider.finalize()
    except AssertionError as error:
        raise ValueError(f"Megatron-Core does not allow this model in this layout: {error}") from error
    return bridge, provider


def _cpu_settings() -> dict[str, Any]:
    """CPU_SETTINGS with layers of Megatron-Core alone; the modules of those need megatron-bridge."""
    from megatron_gcpo.policy.local_layers import local_block_spec
    from megatron_gcpo.policy.local_names import know_local_names

    know_local_names()
    return {**CPU_SETTINGS, "transformer_layer_spec": local_block_spec}

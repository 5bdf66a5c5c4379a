"""RMS normalisation for machines without Transformer Engine or apex, where core's own fallback refuses sequence parallelism.

x / sqrt(mean(x^2) + eps) in fp32, rounded to the input's dtype, then times the weight: the order of operations of the
Hugging Face models that generate the rollouts, so that both sides round alike in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class RMSNorm(nn.Module):
    """Replicated over tensor-parallel ranks; built the way Megatron's layer specs build a norm.

    Under sequence parallelism each rank sees a part of the tokens, so the weight is marked for Megatron to sum its
    gradient over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        assert not config.layernorm_zero_centered_gamma, "got a zero-centred weight, expected a plain one"
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fp32 = x.float()
        scale = torch.rsqrt(fp32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (fp32 * scale).to(x.dtype)


def local_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron's layers without Transformer Engine, for this pipeline stage, with the norm above wherever RMSNorm is asked."""
    if config.normalization != "RMSNorm":
        raise ValueError(
            f"a model with {config.normalization} needs Transformer Engine (CUDA): without it only RMSNorm models train"
        )
    layer: Any = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    submodules = layer.submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention = submodules.self_attention
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    num_layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)

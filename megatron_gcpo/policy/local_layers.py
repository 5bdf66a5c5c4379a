"""Megatron-Core's layers for machines without Transformer Engine, completed where core's own need it.

Core's local layers lack what some families have: attention whose values are shorter than its keys, windows of attention
beside a mask, a norm after a projection. Parameters have the names that the Transformer Engine layers give them, or their
local twins (local_names.py).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.models.gemma.gemma3_provider import Gemma3ModelProvider, Gemma3SelfAttention
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_gcpo.policy.norm import RMSNorm


class LocalAttention(DotProductAttention):
    """Core's dot-product attention that honours a window together with a mask, and values of another width than keys."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels
        # Core would put the window's mask in the place of the one it is given, and packed sequences would see each other.
        self.scale_mask_softmax.window_size = None
        self.positions_back = _window(config, layer_number)

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        """attention_mask: bool, True where a position must not be seen; None: causal."""
        if self.positions_back is not None:
            positions = torch.arange(key.size(0), device=key.device)
            distance_SS = positions[-query.size(0) :, None] - positions[None]
            outside_SS = (distance_SS > self.positions_back) | (distance_SS < 0)
            attention_mask = outside_SS if attention_mask is None else attention_mask | outside_SS
        return super().forward(query, key, value, attention_mask, *args, **kwargs)


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """How many positions back a layer sees; None: all."""
    if isinstance(config, Gemma3ModelProvider):
        is_global = layer_number % sum(config.interleaved_attn_pattern) == 0
        return None if is_global else int(config.window_size) - 1  # type: ignore[arg-type]
    if config.window_size is None:
        return None
    pattern: Any = config.window_attn_skip_freq
    if not is_layer_window_attention(config.window_size, pattern, layer_number):
        return None
    return config.window_size[0]


class LocalLatentAttention(MLASelfAttention):
    """Core's multi-head latent attention, with norms as modules of their own and none where queries are not compressed."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        norm = RMSNorm if self.config.qk_layernorm else IdentityOp
        compressed = self.config.q_lora_rank is not None
        return {
            "linear_q_proj": IdentityOp if compressed else submodules.linear_q_proj,
            "linear_q_up_proj": submodules.linear_q_up_proj if compressed else IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": norm if compressed else IdentityOp,
            "kv_layernorm": norm,
        }


class RowParallelLinearNorm(RowParallelLinear):
    """A projection and a norm of what comes out of it."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_)
        assert bias is None, "got a bias to add after the norm, expected none"
        return self.post_layernorm(output), bias


AutoMapping.register_module_type(RowParallelLinearNorm.__name__, "row")
AutoMapping.register_module_type(LocalAttention.__name__, "column")


def local_block_spec(config: TransformerConfig, vp_stage: int | None = None, **_: object) -> TransformerBlockSubmodules:
    """Megatron's layers of this pipeline stage without Transformer Engine, our norm and attention in them."""
    if config.normalization != "RMSNorm":
        raise ValueError(
            f"a model with {config.normalization} needs Transformer Engine (CUDA): without it only RMSNorm models train"
        )
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    assert block.layer_specs is not None, "got a block without layers, expected those of this stage"
    specs = {id(spec): spec for spec in block.layer_specs}
    for spec in specs.values():
        _complete(spec.submodules, config)
    return TransformerBlockSubmodules(layer_specs=block.layer_specs, layer_norm=RMSNorm)


def _complete(layer: Any, config: TransformerConfig) -> None:
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = LocalAttention
    if isinstance(config, MLATransformerConfig):
        layer.self_attention.module = LocalLatentAttention
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if isinstance(config, Gemma3ModelProvider):
        layer.self_attention.module = Gemma3SelfAttention
        attention.linear_proj = RowParallelLinearNorm
        mlp: Any = layer.mlp
        submodules = replace(mlp.keywords["submodules"], linear_fc2=RowParallelLinearNorm)
        layer.mlp = functools.partial(mlp.func, submodules=submodules)

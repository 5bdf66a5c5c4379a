"""RMS normalisation for machines without Transformer Engine or apex, where core's own fallback refuses sequence parallelism.

x / sqrt(mean(x^2) + eps) in fp32, rounded to the input's dtype, then times the weight: the order of operations of the
Hugging Face models that generate the rollouts, so that both sides round alike in bf16.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class RMSNorm(nn.Module):
    """Replicated over tensor-parallel ranks; built the way Megatron's layer specs build a norm.

    Under sequence parallelism each rank sees a part of the tokens, so the weight is marked for Megatron to sum its
    gradient over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centred = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.full((hidden_size,), 1 - self.zero_centred, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fp32 = x.float()
        scale = torch.rsqrt(fp32.square().mean(-1, keepdim=True) + self.eps)
        if self.zero_centred:  # Gemma, which rounds after the weight
            return (fp32 * scale * (1 + self.weight.float())).to(x.dtype)
        return self.weight * (fp32 * scale).to(x.dtype)

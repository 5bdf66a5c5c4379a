"""Our RMSNorm against those of the Hugging Face models, rounding included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from megatron_gcpo.policy.norm import RMSNorm


@pytest.mark.parametrize(("theirs", "zero_centred"), [(Qwen3RMSNorm, False), (Gemma3RMSNorm, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_rounds_as_the_hugging_face_norm(theirs: Any, zero_centred: bool, dtype: torch.dtype) -> None:
    config: Any = SimpleNamespace(
        layernorm_zero_centered_gamma=zero_centred, params_dtype=dtype, sequence_parallel=True
    )
    ours, oracle = RMSNorm(config, 16, eps=1e-6), theirs(16, eps=1e-6).to(dtype)
    assert torch.equal(ours.weight, oracle.weight)
    assert ours.weight.sequence_parallel  # type: ignore[attr-defined]
    with torch.no_grad():
        for weight in (ours.weight, oracle.weight):
            weight.copy_(torch.linspace(-1, 2, 16))
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype) * 7
    assert torch.equal(ours(x), oracle(x))

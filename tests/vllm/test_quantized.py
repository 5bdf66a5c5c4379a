"""Engines that compute with 8-bit weights: a true gap to the trainer, and pushes that still arrive."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_gcpo.rollout.engine import Sampling
from megatron_gcpo.rollout.vllm.quantize import to_int8
from tests.vllm.tiny import (
    CONFIGS,
    PROMPTS,
    checkpoint,
    of_tokens,
    random_model,
    requests,
    rollout_config,
    true_logprobs,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]
COMPLETIONS = [tuple((7 * i + 3 * j) % 58 + 2 for j in range(40)) for i in range(len(PROMPTS))]


def start(kind: str, family: str = "untied", dtype: str = "bf16"):
    from megatron_gcpo.rollout.vllm.inprocess import VllmEngine

    rollout = rollout_config(quantization=kind)
    return VllmEngine(CONFIGS[family], rollout, dtype=dtype, max_positions=128, cpu=True)


def mean_gap(engine, model) -> float:
    """Mean absolute difference (nats) of the engine's log-probs and the model's, on the same tokens."""
    scores = engine.score(list(zip(PROMPTS, COMPLETIONS, strict=True)))
    truths = [of_tokens(true_logprobs(model, p, c), np.array(c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    return float(np.abs(np.concatenate(scores) - np.concatenate(truths)).mean())


def rounded(model, kind: str):
    """The model with the weights that the engine multiplies with: each channel rounded to 8 bits."""
    for name, parameter in model.named_parameters():
        if not name.endswith("_proj.weight"):
            continue
        if kind == "int8":
            integers, scales = to_int8(parameter)
            parameter.copy_(integers * scales)
        else:
            scales = parameter.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            parameter.copy_((parameter / scales).to(torch.float8_e4m3fn).float() * scales)
    return model


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_gap_is_real_and_is_that_of_rounding(kind: str) -> None:
    """After each push the engine is nearer to the rounded model than to the exact one, and far from other weights."""
    engine = start(kind)
    for seed in (0, 1, 0):
        exact = random_model("untied", seed, torch.bfloat16)
        engine.load_weights(checkpoint(exact, torch.bfloat16))
        gap = mean_gap(engine, exact)
        near = mean_gap(engine, rounded(random_model("untied", seed, torch.bfloat16), kind))
        far = mean_gap(engine, random_model("untied", 5, torch.bfloat16))
        print(f"{kind}: exact {gap:.4f}, rounded {near:.4f}, other {far:.4f}")
        assert 2e-3 < gap < 0.2 * far
        assert near < gap
    [sample, *_] = engine.generate(requests(), Sampling())
    assert len(sample.token_ids) == 24
    engine.close()


def test_what_cannot_be_quantised_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="no quantised experts that can be loaded anew on a CPU"):
        start("fp8", "moe")
    with pytest.raises(ValueError, match=r"set rollout\.dtype=bf16"):
        start("fp8", dtype="fp32")

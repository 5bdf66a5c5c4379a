"""The trainer with one thing switched, for the length of a measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_gcpo.policy.model import Policy, unwrapped

GOLDEN = (math.sqrt(5) - 1) / 2


def fit_temperature(gap: Callable[[float], float], configured: float) -> float:
    """The temperature between a quarter and four times the configured one at which ``gap`` is smallest.

    Golden-section search on a logarithmic scale around the best of a coarse grid; temperatures that mistakes lead to (not
    applied, applied twice, inverted) are tried as they are and preferred to a fit that is not clearly better.
    """
    tried: dict[float, float] = {}

    def at(log_ratio: float) -> float:
        temperature = configured * math.exp(log_ratio)
        if temperature not in tried:
            tried[temperature] = gap(temperature)
        return tried[temperature]

    step = math.log(4) / 4
    best = min((step * k for k in range(-4, 5)), key=at)
    low, high = best - step, best + step
    for _ in range(10):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        if at(left) <= at(right):
            high = right
        else:
            low = left
    fitted = min(tried, key=lambda temperature: tried[temperature])
    for likely in (1.0, configured**2, 1 / configured):
        if abs(math.log(likely / fitted)) < 0.05 and gap(likely) <= tried[fitted] * 1.1:
            return likely
    return fitted


@contextmanager
def positions_after_gap(policy: Policy, first: int) -> Iterator[bool]:
    """Position ids from ``first`` on are one larger; False, and nothing changes, where positions are not plain rotary."""
    rotaries: list[Any] = [getattr(model, "rotary_pos_emb", None) for model in unwrapped(policy)]
    plain = all(type(rotary) is RotaryEmbedding for rotary in rotaries) and policy.provider.context_parallel_size == 1

    def skip_one(rotary: Any) -> Callable[..., torch.Tensor]:
        def forward(max_seq_len: int, *args: Any, **kwargs: Any) -> torch.Tensor:
            angles = RotaryEmbedding.forward(rotary, max_seq_len + 1, *args, **kwargs)
            return torch.cat([angles[:first], angles[first + 1 :]]) if first < max_seq_len else angles[:max_seq_len]

        return forward

    if not plain:
        yield False
        return
    for rotary in rotaries:
        rotary.forward = skip_one(rotary)
    try:
        yield True
    finally:
        for rotary in rotaries:
            del rotary.forward


@contextmanager
def computed_in(policy: Policy, dtype: torch.dtype) -> Iterator[None]:
    """Weights (rounded) and activations in another dtype. Takes the memory of a second copy of this rank's weights."""
    config, modules = policy.provider, [m for chunk in policy.chunks for m in chunk.modules()]
    parameters = [p for chunk in policy.chunks for p in chunk.module.parameters()]
    softmaxes = [m for m in modules if isinstance(m, FusedScaleMaskSoftmax)]
    own = [p.data for p in parameters]
    settings = (config.params_dtype, config.pipeline_dtype)
    flags = [(m.input_in_bf16, m.input_in_float16) for m in softmaxes]
    low = dtype == torch.bfloat16
    try:
        config.params_dtype = config.pipeline_dtype = dtype
        for softmax in softmaxes:
            softmax.input_in_bf16 = softmax.input_in_float16 = low
        for p in parameters:
            # weights that the model keeps in fp32 whatever its dtype stay
            p.data = p.data.to(dtype) if p.dtype == settings[0] else p.data
        yield
    finally:
        config.params_dtype, config.pipeline_dtype = settings
        for softmax, (bf16, float16) in zip(softmaxes, flags, strict=True):
            softmax.input_in_bf16, softmax.input_in_float16 = bf16, float16
        for p, data in zip(parameters, own, strict=True):
            p.data = data

"""The routing that the embedded engine records is that of a full forward pass over the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from megatron_gcpo.rollout.engine import Sample, SampleRequest, Sampling
from megatron_gcpo.rollout.transformers_engine import TransformersEngine

from .models import CONFIGS, random_model

PROMPTS = [(5, 9, 3), (12, 4, 4, 33, 21, 8), (7,), (5, 9, 3, 40)]
REQUESTS = [
    SampleRequest(prompt_token_ids=prompt, seed=10 * p + s, max_new_tokens=3 + 4 * s)
    for p, prompt in enumerate(PROMPTS)
    for s in range(3)
]
SAMPLING = Sampling(stop_token_ids=(1, 2, 3, 4, 5))


def engine_of(model: torch.nn.Module, **options: bool) -> TransformersEngine:
    engine = TransformersEngine(
        CONFIGS["qwen3_moe"], device=torch.device("cpu"), dtype=torch.float32, max_batch_rows=7, **options
    )
    engine.load_weights(revert_weight_conversion(model, model.state_dict()).items())
    return engine


def routed_by(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """[T, layers, k] of one full forward pass, from the routers' own outputs."""
    chosen: list[torch.Tensor] = []
    hooks = [
        block.mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        for block in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).numpy()


@pytest.fixture(scope="module")
def drawn() -> tuple[torch.nn.Module, list[Sample], list[Sample]]:
    """A model, and the same requests with and without recording."""
    model = random_model("qwen3_moe")
    recording = engine_of(model, return_routed_experts=True)
    return model, recording.generate(REQUESTS, SAMPLING), engine_of(model).generate(REQUESTS, SAMPLING)


def test_each_token_s_experts_are_those_of_a_full_forward_pass(drawn) -> None:
    model, samples, _ = drawn
    assert len({len(sample.token_ids) for sample in samples}) > 3  # rows left the batch at different times
    for request, sample in zip(REQUESTS, samples, strict=True):
        tokens = [*request.prompt_token_ids, *sample.token_ids.tolist()]
        routed = sample.routed_experts
        assert routed.dtype == np.int16
        assert routed.shape == (len(tokens), 2, 2)
        np.testing.assert_array_equal(routed[:-1], routed_by(model, tokens)[:-1])
        assert (routed[-1] == -1).all()


def test_recording_changes_no_number(drawn) -> None:
    _, samples, plain = drawn
    for recorded, sample in zip(samples, plain, strict=True):
        np.testing.assert_array_equal(recorded.token_ids, sample.token_ids)
        np.testing.assert_array_equal(recorded.logprobs, sample.logprobs)
        assert sample.routed_experts is None


def test_scoring_between_two_draws_is_not_recorded(drawn) -> None:
    model, samples, _ = drawn
    engine = engine_of(model, return_routed_experts=True)
    engine.score([((5, 6), (7, 8, 9))])
    again = engine.generate(REQUESTS[:4], SAMPLING)
    for sample, first in zip(again, samples, strict=False):
        np.testing.assert_array_equal(sample.routed_experts, first.routed_experts)


def test_layers_without_experts_are_unknown() -> None:
    config = type(CONFIGS["qwen3_moe"])(**{**CONFIGS["qwen3_moe"].to_dict(), "mlp_only_layers": [0]})
    engine = TransformersEngine(
        config, device=torch.device("cpu"), dtype=torch.float32, max_batch_rows=4, return_routed_experts=True
    )
    with torch.no_grad():
        weights = {name: torch.randn(slot.shape) / 8 for name, slot in engine._slots.items()}
    engine.load_weights(weights.items())
    for sample in engine.generate(REQUESTS[:2], SAMPLING):
        assert (sample.routed_experts[:, 0] == -1).all()
        assert (sample.routed_experts[:-1, 1] >= 0).all()


def test_a_dense_model_has_no_routing_to_record() -> None:
    with pytest.raises(ValueError, match=r"no routed experts: set rollout\.router_replay: false"):
        TransformersEngine(
            CONFIGS["qwen3"],
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_batch_rows=4,
            return_routed_experts=True,
        )

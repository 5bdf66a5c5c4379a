"""Pushes from Megatron layouts to vLLM: what the engine decodes afterwards is what the trainer's weights decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.dist.harness import run_ranks
from tests.vllm import push_ranks
from tests.vllm.tiny import PROMPTS, of_tokens, true_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
TP2_PP2 = {"processes_per_node": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
LIMITS = {"fp32": 1e-3, "bf16": 5e-2}


def oracle(family: str, weights: dict[str, torch.Tensor]) -> Any:
    """The Hugging Face model with the trainer's own export."""
    from megatron_gcpo.rollout.hf_weights import checkpoint_slots, load_into

    model = AutoModelForCausalLM.from_config(push_ranks.FAMILIES[family], dtype=torch.float32).eval()
    load_into(model, checkpoint_slots(model), weights.items())
    return model


def assert_follows(result: dict[str, Any], case: dict[str, Any]) -> None:
    limit = LIMITS[case["dtype"]]
    for push in result["pushes"]:
        model = oracle(case["family"], push["weights"])
        for prompt, (token_ids, scores) in zip(PROMPTS, push["decoded"], strict=True):
            truth_TV = true_logprobs(model, prompt, token_ids)
            margin = 0.0 if case["dtype"] == "fp32" else limit
            assert (truth_TV.max(1) - of_tokens(truth_TV, np.array(token_ids))).max() <= margin
            np.testing.assert_allclose(scores, of_tokens(truth_TV, np.array(token_ids)), atol=limit)


def assert_sharded(result: dict[str, Any]) -> None:
    for push in result["pushes"]:
        stats = push["stats"]
        assert (stats.mode, push["why_full"]) == ("sharded", None)
        assert stats.num_bytes == stats.minimal_bytes > 0


DENSE: dict[str, dict[str, Any]] = {
    "tied, in the leader's process": {"family": "tied", "dtype": "fp32", "engine_tp": 1, "failures": True},
    "untied, in the leader's process": {"family": "untied", "dtype": "bf16", "engine_tp": 1},
    "biases, in the leader's process": {"family": "qwen2", "dtype": "fp32", "engine_tp": 1},
    "untied, beside it on two ranks": {"family": "llama", "dtype": "fp32", "engine_tp": 2},
    "tied, beside it on two ranks": {"family": "tied", "dtype": "fp32", "engine_tp": 2, "failures": True},
}
DENSE = {name: {"sizes": TP2_PP2, **case} for name, case in DENSE.items()}
APART = {"processes_per_node": 2, "expert_model_parallel_size": 2}
INSIDE = {**APART, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True}
EXPERTS: dict[str, dict[str, Any]] = {
    "over replicas": {"family": "moe", "dtype": "fp32", "sizes": APART, "engine_tp": 1},
    "over ranks": {"family": "moe", "dtype": "fp32", "sizes": INSIDE, "engine_tp": 2},
}


def run(cases: dict[str, dict[str, Any]], num_ranks: int, folder: Path) -> dict[str, dict[str, Any]]:
    """The results of the leader of each case. All of them in the same processes, which import vLLM once."""
    kwargs = {"cases": list(cases.values()), "folder": str(folder)}
    ranks = run_ranks(push_ranks.__file__, "push_cases", num_ranks, kwargs, folder, timeout_s=380)
    return dict(zip(cases, ranks[0], strict=True))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run(DENSE, 4, tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run(EXPERTS, 2, tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("name", DENSE)
def test_dense_tp2_pp2(name: str, dense: dict[str, dict[str, Any]]) -> None:
    assert_sharded(dense[name])
    assert_follows(dense[name], DENSE[name])


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_on_two_ranks(name: str, experts: dict[str, dict[str, Any]]) -> None:
    """Over replicas, each with an engine of its own; over the tensor-parallel ranks of one."""
    assert_sharded(experts[name])
    assert_follows(experts[name], EXPERTS[name])

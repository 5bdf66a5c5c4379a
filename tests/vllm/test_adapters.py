"""Pushes of adapters alone: the engine decodes what the trainer's merged weights decode, and the weights below stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.harness import run_ranks
from tests.vllm import adapter_ranks
from tests.vllm.test_push import oracle
from tests.vllm.tiny import PROMPTS, of_tokens, true_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
TP2 = {"processes_per_node": 2, "tensor_model_parallel_size": 2}
ALL = {"rank": 4, "alpha": 6}
CASES: dict[str, dict[str, Any]] = {
    "tied": {
        "family": "tied",
        "sizes": TP2,
        "lora": ALL,
        "merged": True,
        "failures": True,
        "in_flight": True,
    },
    "llama": {"family": "llama", "sizes": {**TP2, "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 1}},
    "biases": {"family": "qwen2", "sizes": TP2, "lora": {**ALL, "target_modules": ("linear_fc1", "linear_fc2")}},
    "bf16": {"family": "untied", "sizes": TP2, "dtype": "bf16", "limit": 0.1},
    "tied, on two ranks": {"family": "tied", "sizes": TP2, "engine_tp": 2},
    "llama, on two ranks": {"family": "llama", "sizes": TP2, "engine_tp": 2},
}
CASES = {
    name: {"lora": ALL, "dtype": "fp32", "engine_tp": 1, "limit": 1e-4, **case, "name": name}
    for name, case in CASES.items()
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of each case on its leader."""
    folder = tmp_path_factory.mktemp("adapters")
    kwargs = {"cases": list(CASES.values()), "folder": str(folder)}
    ranks = run_ranks(adapter_ranks.__file__, "push_cases", 2, kwargs, folder, timeout_s=280)
    return dict(zip(CASES, ranks[0], strict=True))


def assert_decodes(decoded: Any, family: str, weights: dict[str, torch.Tensor], limit: float, margin: float) -> None:
    model = oracle(family, weights)
    for prompt, (token_ids, scores) in zip(PROMPTS, decoded, strict=True):
        truth_TV = true_logprobs(model, prompt, token_ids)
        truth_T = of_tokens(truth_TV, np.array(token_ids))
        assert (truth_TV.max(1) - truth_T).max() <= margin
        np.testing.assert_allclose(scores, truth_T, atol=limit)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_and_scores_are_those_of_the_merged_weights(name: str, results: dict[str, Any]) -> None:
    """After each push, by the Hugging Face model with the trainer's merged export; and by the trainer itself."""
    case, result = CASES[name], results[name]
    margin = 0.0 if case["dtype"] == "fp32" else case["limit"]
    for push in result["pushes"]:
        assert_decodes(push["decoded"], case["family"], push["weights"], case["limit"], margin)
    first, second, third = (push["decoded"] for push in result["pushes"])
    assert first == third != second
    assert result["verified"]["max_logprob_gap"] <= case["limit"]


def test_a_merged_push_decodes_the_same(results: dict[str, Any]) -> None:
    alone, merged = results["tied"]["pushes"][-1]["decoded"], results["tied"]["merged"]["decoded"]
    for (ids, scores), (merged_ids, merged_scores) in zip(alone, merged, strict=True):
        assert ids == merged_ids
        np.testing.assert_allclose(scores, merged_scores, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_after_the_first_push_only_adapters_travel(name: str, results: dict[str, Any]) -> None:
    """Their bytes are rank x (inputs + outputs) of each Hugging Face matrix, for every worker."""
    case, pushes = CASES[name], results[name]["pushes"]
    stats = [push["stats"] for push in pushes]
    assert [s.mode for s in stats] == ["full", "adapters", "adapters"]
    words = {"linear_qkv": "qkv", "linear_proj": "o", "linear_fc1": ("gate", "up"), "linear_fc2": ("down",)}
    targets = case["lora"].get("target_modules", words)
    parts = [f".{word}_proj." for target in targets for word in words[target]]
    shapes = [w.shape for n, w in pushes[0]["weights"].items() if any(p in n for p in parts)]
    itemsize = 2 if case["dtype"] == "bf16" else 4
    alone = case["engine_tp"] * case["lora"]["rank"] * itemsize * sum(out + into for out, into in shapes)
    below = case["engine_tp"] * itemsize * sum(w.numel() for w in pushes[0]["weights"].values())
    assert [s.num_bytes for s in stats] == [below + alone, alone, alone]
    assert alone < below / 4


def test_what_goes_wrong_is_caught_and_the_next_adapters_repair_it(results: dict[str, Any]) -> None:
    repaired = results["tied"]["repaired"]
    assert [push["stats"].mode for push in repaired] == ["adapters"] * 6
    for push in repaired:
        assert_decodes(push["decoded"], "tied", push["weights"], 1e-4, 0.0)
    assert repaired[-1]["decoded"] != repaired[0]["decoded"]


def test_other_weights_end_the_adapters_and_the_next_push_brings_all_again(results: dict[str, Any]) -> None:
    replaced, [after] = results["tied"]["replaced"], results["tied"]["after_replaced"]
    assert_decodes(replaced["decoded"], "tied", replaced["weights"], 1e-4, 0.0)
    assert after["stats"].mode == "full"
    assert_decodes(after["decoded"], "tied", after["weights"], 1e-4, 0.0)


def test_adapters_change_under_way_and_every_token_names_its_own(results: dict[str, Any]) -> None:
    found = results["tied"]["in_flight"]
    models = oracle("tied", found["old"]), oracle("tied", found["new"])
    assert len(found["samples"]) == 3
    for prompt, (token_ids, logprobs, is_new_T) in zip(PROMPTS, found["samples"], strict=False):
        assert 0 < is_new_T.sum() < len(is_new_T)
        for model, part_T in zip(models, (~is_new_T, is_new_T), strict=True):
            truth_T = of_tokens(true_logprobs(model, prompt, token_ids), np.asarray(token_ids))
            np.testing.assert_allclose(logprobs[part_T], truth_T[part_T], atol=1e-4)

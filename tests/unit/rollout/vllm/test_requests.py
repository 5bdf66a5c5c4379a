"""Our requests as vLLM's parameters, and its answers as samples."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_gcpo.rollout.engine import SampleRequest, Sampling
from megatron_gcpo.rollout.vllm.requests import padded_experts, sample_of, sampling_params, scoring_params, versions_of


def test_parameters_are_json_and_say_everything() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(3, 4))
    params = sampling_params(SampleRequest(prompt_token_ids=(1,), seed=9, max_new_tokens=12), sampling)
    assert json.loads(json.dumps(params)) == params
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 9, "max_tokens": 12}
    assert params.items() >= {**expected, "ignore_eos": True, "logprobs": 0}.items()
    assert params["stop_token_ids"] == [3, 4]
    assert json.loads(json.dumps(scoring_params()))["prompt_logprobs"] == 0


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_seed_is_one_that_vllm_takes_and_never_its_none(seed: int) -> None:
    params = sampling_params(SampleRequest(prompt_token_ids=(1,), seed=seed, max_new_tokens=1), Sampling())
    assert 0 <= params["seed"] < 2**63


def test_an_answer_becomes_a_sample() -> None:
    sample = sample_of([5, 6, 7], [-1.0, -2.0, -0.5], "stop", [("3", 0, 2), ("4", 2, 3)], "request 0")
    assert (sample.token_ids.dtype, sample.logprobs.dtype, sample.versions_T.dtype) == (np.int64, np.float32, np.int32)
    assert sample.token_ids.tolist() == [5, 6, 7]
    assert sample.versions_T.tolist() == [3, 3, 4]
    assert sample.finish_reason == "stop"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (([5], [-1.0], "abort", [("3", 0, 1)]), "ended request 7 with 'abort' after 1 tokens"),
        (([5], [-1.0], None, [("3", 0, 1)]), "ended request 7 with None"),
        (([], [], "length", []), "0 tokens and 0 log-probs"),
        (([5, 6], [-1.0], "stop", [("3", 0, 2)]), "2 tokens and 1 log-probs"),
        (([5], [float("nan")], "stop", [("3", 0, 1)]), "not finite"),
        (([5], [float("-inf")], "stop", [("3", 0, 1)]), "not finite"),
        (([5, 6], [-1.0, -1.0], "stop", [("3", 0, 1)]), "which weights drew 1 tokens"),
        (([5], [-1.0], "stop", [("default", 0, 1)]), "weights 'default' that were never committed"),
    ],
)
def test_an_incomplete_or_contradictory_answer_is_refused(answer: tuple, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        sample_of(*answer, "request 7")


def test_versions_cover_the_tokens() -> None:
    assert versions_of([("0", 0, 4)], 4, "x").tolist() == [0, 0, 0, 0]


def test_experts_of_uncomputed_tokens_are_unknown() -> None:
    routed = np.arange(12).reshape(3, 2, 2)
    padded = padded_experts(routed, 4)
    assert padded is not None
    assert padded.dtype == np.int16
    np.testing.assert_array_equal(padded[:3], routed)
    assert (padded[3] == -1).all()
    assert padded_experts(None, 4) is None

"""Mistakes in the choice of a rollout engine are found before anything starts and name the field to change."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from megatron_gcpo.config import validate
from tests.unit.config.test_checks import changed


@pytest.fixture(autouse=True)
def vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "vllm" else find_spec(name))


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout__engine": "vllm"},
        {"rollout__engine": "vllm", "rollout__quantization": "fp8"},
        {"rollout__engine": "vllm", "rollout__vllm": {"max_model_len": 88, "options": {"max_num_batched_tokens": 64}}},
        {"rollout__engine": "vllm_server", "rollout__vllm": {"urls": ["http://127.0.0.1:8000"]}},
    ],
)
def test_sound_choices(fields: dict[str, Any]) -> None:
    validate(changed(**fields), origin="r")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rollout__quantization": "fp8"}, "rollout.quantization fp8 needs vLLM"),
        ({"rollout__engine": "vllm", "rollout__vllm": {"max_model_len": 87}}, "raise it to at least 88"),
        (
            {"rollout__engine": "vllm_server"},
            "a URL in rollout.vllm.urls for each of the trainer's 1 replicas, found 0",
        ),
        (
            {
                "rollout__engine": "vllm_server",
                "rollout__vllm": {"urls": ["http://a"]},
                "cluster__processes_per_node": 4,
            },
            "2 replicas, found 1",
        ),
        ({"rollout__engine": "vllm", "rollout__vllm": {"urls": ["http://a"]}}, "belongs to rollout.engine vllm_server"),
        (
            {"rollout__engine": "vllm", "rollout__vllm": {"options": {"max_num_seqs": 4}}},
            "rollout.vllm.options.max_num_seqs is decided by rollout.max_batch_rows",
        ),
        (
            {"rollout__engine": "vllm", "rollout__temperature": 2.5},
            "rollout.temperature 2.5 is not one that vLLM takes",
        ),
        ({"rollout__engine": "vllm", "evaluate__temperature": 0.001}, "evaluate.temperature 0.001"),
    ],
)
def test_mistakes(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError) as failure:  # noqa: PT011 - the text is compared below, braces and all
        validate(changed(**fields), origin="r")
    assert problem in str(failure.value)


def test_vllm_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    with pytest.raises(ValueError, match="run `make vllm`"):
        validate(changed(rollout__engine="vllm"), origin="r")
    validate(changed(rollout__engine="vllm_server", rollout__vllm={"urls": ["http://a"]}), origin="r")

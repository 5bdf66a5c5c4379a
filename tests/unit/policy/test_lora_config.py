"""What is refused about adapters before anything starts, and what a checkpoint of them says of itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_gcpo.config import validate
from megatron_gcpo.config.records import LoraConfig
from megatron_gcpo.policy import manifest as manifests

LORA = LoraConfig(rank=4, alpha=8)
WRITTEN = manifests.Manifest(
    format=1,
    step=3,
    versions={},
    layout={},
    dtype="fp32",
    model={},
    model_hash="",
    files={},
    lora={**LORA.model_dump(mode="json"), "base": "abc"},
)
WHOLE = replace(WRITTEN, lora=None)
HERE = Path("somewhere")


def config(
    lora: dict[str, Any] | None, tp: int = 2, rollout: dict[str, Any] | None = None, **checkpoint: Any
) -> dict[str, Any]:
    return {
        "model": {"hf_config": {"model_type": "qwen3"}, "tokenizer": "task", "lora": lora},
        "data": {"train": {"kind": "task", "name": "addition"}, "max_prompt_tokens": 24},
        "rollout": {"max_new_tokens": 64, **(rollout or {})},
        "train": {"optimizer": {"lr": 1e-3}, "max_tokens_per_micro_batch": 256},
        "cluster": {"platform": "cpu", "processes_per_node": tp, "tensor_model_parallel_size": tp},
        "checkpoint": checkpoint,
    }


def test_sound_adapters_are_sound() -> None:
    found = validate(config({"rank": 4}, export_merged=True, export_hf_every=2), origin="r").model.lora
    assert found is not None
    assert (found.rank, found.alpha) == (4, 32)
    assert validate(config(None), origin="r").model.lora is None


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 3}, "model.lora.rank 3 cannot be cut over cluster.tensor_model_parallel_size 2: set it to 4"),
        ({"rank": 0}, "model.lora.rank"),
        ({"alpha": -1}, "model.lora.alpha"),
        ({"target_modules": []}, "model.lora.target_modules is empty"),
        ({"target_modules": ["q_proj"]}, "q_proj is a part of Megatron's linear_qkv: name that"),
        ({"target_modules": ["up_proj"]}, "up_proj is a part of Megatron's linear_fc1"),
        ({"target_modules": ["linear_qvk"]}, "did you mean linear_qkv?"),
        ({"target_modules": ["down_prj"]}, "did you mean linear_fc2?"),
        ({"ranks": 4}, "model.lora.ranks is not a field; did you mean model.lora.rank?"),
    ],
)
def test_mistakes_name_the_field_and_what_would_be_right(lora: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        validate(config(lora), origin="r")


ALONE: list[tuple[dict[str, Any] | None, dict[str, Any], str]] = [
    (
        None,
        {"engine": "vllm", "vllm": {"lora": True}},
        "rollout.vllm.lora is for adapters: leave it out, or set model.lora",
    ),
    ({}, {"vllm": {"lora": True}}, "rollout.vllm.lora goes with rollout.engine vllm: an engine of kind transformers"),
    (
        {},
        {"engine": "vllm_server", "vllm": {"lora": True, "urls": ["http://127.0.0.1:8000"]}},
        "rollout.vllm.lora goes with rollout.engine vllm: an engine of kind vllm_server takes adapters merged into the weights",
    ),
    (
        {},
        {"engine": "vllm", "vllm": {"lora": True}, "quantization": "int8"},
        "rollout.vllm.lora does not go with rollout.quantization int8",
    ),
    (
        {},
        {"engine": "vllm", "vllm": {"lora": True}, "push": {"mode": "sharded"}},
        "rollout.push.mode sharded does not go with rollout.vllm.lora",
    ),
    *(
        (
            {},
            {"engine": "vllm", "vllm": {"options": {option: 1}}},
            f"rollout.vllm.options.{option} is decided by rollout.vllm.lora",
        )
        for option in ("enable_lora", "max_lora_rank", "fully_sharded_loras")
    ),
]


@pytest.mark.parametrize(("lora", "rollout", "said"), ALONE)
def test_adapters_travel_alone_only_to_engines_that_take_them(
    lora: dict[str, Any] | None, rollout: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        validate(config(lora, rollout=rollout), origin="r")


def test_merging_needs_adapters() -> None:
    with pytest.raises(ValueError, match=r"checkpoint.export_merged is for adapters"):
        validate(config(None, export_merged=True), origin="r")


def test_a_run_goes_on_with_the_adapters_it_had() -> None:
    manifests.check_lora(WRITTEN, LORA, HERE)
    manifests.check_lora(WHOLE, None, HERE)
    for manifest, lora, said in (
        (WRITTEN, None, "this run has no adapters"),
        (WHOLE, LORA, "was trained with no adapters"),
        (WRITTEN, LORA.model_copy(update={"alpha": 9}), "alpha 8.*alpha 9"),
    ):
        with pytest.raises(ValueError, match=said):
            manifests.check_lora(manifest, lora, HERE)


def test_a_start_takes_adapters_only_with_their_settings() -> None:
    manifests.check_start(WRITTEN, LORA, HERE)
    manifests.check_start(WHOLE, LORA, HERE)
    manifests.check_start(WHOLE, None, HERE)
    with pytest.raises(ValueError, match="holds adapters alone"):
        manifests.check_start(WRITTEN, None, HERE)
    with pytest.raises(ValueError, match="was trained with adapters"):
        manifests.check_start(WRITTEN, LORA.model_copy(update={"rank": 8}), HERE)


def test_adapters_belong_to_one_set_of_weights() -> None:
    manifests.check_base(WRITTEN, "abc", HERE)
    manifests.check_base(WHOLE, "whatever", HERE)
    with pytest.raises(ValueError, match="a model with other weights"):
        manifests.check_base(WRITTEN, "abd", HERE)


def test_a_manifest_without_the_field_is_of_a_whole_model(tmp_path: Path) -> None:
    """Checkpoints from before there were adapters."""
    manifests.write(tmp_path, WHOLE)
    text = (tmp_path / manifests.NAME).read_text()
    values = json.loads(text)
    del values["lora"]
    (tmp_path / manifests.NAME).write_text(json.dumps(values))
    assert manifests.read(tmp_path).lora is None

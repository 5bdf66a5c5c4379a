"""Which layouts a model can be cut for, known from its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_gcpo.config.records import ClusterConfig, ModelConfig
from megatron_gcpo.policy.hf_config import check_layout, count_experts, read_hf_config

QWEN3 = AutoConfig.for_model("qwen3", num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=6)


def cluster(**sizes: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"processes_per_node": 240, **sizes})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_may_share_a_key_value_head(tp: int) -> None:
    check_layout(QWEN3, cluster(tensor_model_parallel_size=tp))


@pytest.mark.parametrize("tp", [3, 5, 16])
def test_heads_that_cannot_be_shared_out_are_refused(tp: int) -> None:
    with pytest.raises(ValueError, match=rf"{tp} does not divide the 8 attention heads: use 1, 2, 4 or 8$"):
        check_layout(QWEN3, cluster(tensor_model_parallel_size=tp))


def test_uneven_stages_need_the_options_that_place_layers() -> None:
    four = cluster(pipeline_model_parallel_size=4)
    with pytest.raises(ValueError, match=r"4 does not divide the 6 layers: use 1, 2, 3 or 6 stages"):
        check_layout(QWEN3, four)
    check_layout(QWEN3, four, {"num_layers_in_first_pipeline_stage": 0})
    with pytest.raises(ValueError, match=r"does not divide the 6 layers"):
        check_layout(QWEN3, four, {"recompute_granularity": "full"})


@pytest.mark.parametrize(
    ("model_type", "field", "expected"),
    [
        ("qwen3", None, 0),
        ("qwen3_moe", "num_experts", 6),
        ("deepseek_v3", "n_routed_experts", 6),
        ("gpt_oss", "num_local_experts", 6),
    ],
)
def test_experts_are_counted_whatever_their_name(model_type: str, field: str | None, expected: int) -> None:
    config = AutoConfig.for_model(model_type, **({field: 6} if field else {}))
    assert count_experts(config) == expected
    if expected:
        check_layout(config, cluster(expert_model_parallel_size=3, tensor_model_parallel_size=1))
        with pytest.raises(ValueError, match=r"expert_model_parallel_size 4 does not divide the 6 experts"):
            check_layout(config, cluster(expert_model_parallel_size=4))


def test_heads_that_suit_only_the_queries_are_not_advised() -> None:
    config = AutoConfig.for_model("qwen3", num_attention_heads=12, num_key_value_heads=4)
    with pytest.raises(
        ValueError, match=r"3 is neither a divisor nor a multiple of the 4 key-value heads: use 1, 2, 4 or 12"
    ):
        check_layout(config, cluster(tensor_model_parallel_size=3))


WRONG: dict[str, tuple[str, str]] = {
    "a wrong type": ('{"model_type": "qwen3", "hidden_size": "wide"}', "hidden_size"),
    "no JSON": ("{", "config.json"),
    "no model type": ("{}", "model_type"),
    "no model of transformers": ('{"model_type": "qwen33"}', "qwen33"),
}


@pytest.mark.parametrize(("text", "named"), WRONG.values(), ids=WRONG)
def test_a_config_that_cannot_be_read_is_one_line(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"^model\.path .*: no Hugging Face config can be read there \(") as error:
        read_hf_config(ModelConfig(path=str(tmp_path)))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_written_out_config_with_a_wrong_type_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^model\.hf_config is not a valid qwen3 config: .*hidden_size") as error:
        read_hf_config(ModelConfig(hf_config={"model_type": "qwen3", "hidden_size": "wide"}))
    assert "\n" not in str(error.value)

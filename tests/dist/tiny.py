"""A whole run in miniature: eleven words, a policy of a few thousand weights, rewards that chance finds from the start.

A completion is right when the last colour it names is the prompt's; drawn at random from so few words, some are.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import yaml

WORDS = ("red", "blue", "sky", "sea", "hill", "is", "the", "near", "far")
COLOURS = WORDS[:2]


def write_recipe(folder: Path, **sections: dict[str, Any]) -> Path:
    """A recipe with its tokenizer and data in ``folder``; ``sections`` are merged over it, one level deep."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder / "tokenizer")
    prompts = list(itertools.permutations(WORDS[2:], 5))
    for name, first, last in (("train", 0, 24), ("heldout", 24, 28)):
        rows = [
            {
                "id": f"{name}-{i}",
                "prompt": " ".join(words),
                "answer": COLOURS[i % 2],
                "solution": f"the {words[0]} is {COLOURS[i % 2]}",
            }
            for i, words in enumerate(prompts[first:last])
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = _recipe(folder)
    for section, fields in sections.items():
        recipe[section] = {**recipe.get(section, {}), **fields}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def _recipe(folder: Path) -> dict[str, Any]:
    source = {"kind": "jsonl", "id_column": "id"}
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    return {
        "run": {"name": "tiny", "output_dir": str(folder / "run"), "steps": 4},
        "model": {
            "hf_config": {"model_type": "qwen3", **shape},
            "tokenizer": str(folder / "tokenizer"),
            "dtype": "fp32",
        },
        "cluster": {"platform": "cpu", "processes_per_node": 2, "collective_timeout_s": 120},
        "data": {
            "train": {**source, "path": str(folder / "train.jsonl")},
            "heldout": {**source, "path": str(folder / "heldout.jsonl")},
            "template": "plain",
            "max_prompt_tokens": 8,
        },
        "rollout": {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 6},
        "method": {"name": "gcpo"},
        "verify": {
            "name": "exact",
            "options": {"pattern": f"({'|'.join(COLOURS)})"},
            "num_workers": 1,
            "isolation": "best_effort",
        },
        "train": {
            "max_tokens_per_micro_batch": 64,
            "optimizer": {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 1.0},
            "scheduler": {"lr_decay_style": "linear", "lr_warmup_steps": 2},
        },
        "evaluate": {"samples": 2, "ks": [1, 2]},
        "observe": {"tensorboard": False},
    }


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(("<pad>", "<eos>", *WORDS))}))
    backend.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    ).save_pretrained(str(folder))

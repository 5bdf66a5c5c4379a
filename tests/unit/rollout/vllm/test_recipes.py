"""The recipes for GPUs resolve, fit the model and the layout, and say what they would do, on any machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config

from megatron_gcpo.data.tasks import make_task
from megatron_gcpo.data.tokenizer import build_task_tokenizer

SCRIPT = """
import sys
from megatron_gcpo.cli import main
recipes = sys.argv[1].split()
sys.exit(max(main(["train", recipe, *sys.argv[2:], "--dry-run"]) for recipe in recipes))
"""


def test_dry_runs(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM comes with `make vllm`")
    shape = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936}
    shape["architectures"] = ["Qwen3ForCausalLM"]
    Qwen3Config(**shape, **heads, max_position_embeddings=40960, tie_word_embeddings=False).save_pretrained(tmp_path)
    build_task_tokenizer(make_task("addition", {})).save_pretrained(tmp_path)
    for name in ("train", "heldout"):
        rows = [{"prompt": f"what is 2 + {i % 10} ?", "answer": str(i), "id": str(i)} for i in range(64)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"model.path={tmp_path}",
        f"data.train.path={tmp_path}/train.jsonl",
        f"data.heldout.path={tmp_path}/heldout.jsonl",
        "data.template=plain",
        "data.system_prompt=null",
        "cluster.platform=cpu",
        "rollout.vllm.kv_cache_gib=1",
    ]
    recipes = "configs/recipe/vllm_h100_colocated.yaml configs/recipe/vllm_h100_split.yaml"
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, recipes, *overrides], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("8 ranks = 2 replicas") == 2
    assert "http://rollout-node:8001" in result.stdout

"""What every rank of a test needs: imported and done once, by the process that the ranks are forked from (harness.py)."""

import gc
import importlib

import torch

from megatron_gcpo.cluster import platform
from megatron_gcpo.config.records import ClusterConfig, ModelConfig

torch.set_num_threads(1)
cpu = platform.install("cpu")
platform.import_megatron_bridge(cpu)
for name in (
    "megatron_gcpo.policy.actor",
    "megatron_gcpo.policy.build",
    "megatron_gcpo.policy.checkpoint",
    "megatron_gcpo.policy.reference",
    "megatron_gcpo.rollout.transformers_engine",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
):
    importlib.import_module(name)

from megatron_gcpo.policy.count import count_parameters  # noqa: E402
from megatron_gcpo.policy.provider import read_causal_lm  # noqa: E402
from megatron_gcpo.policy.weights import random_hf_state  # noqa: E402

# The first model of a process imports more, and compiles hundreds of patterns of names.
sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 8}
model = ModelConfig(hf_config={"model_type": "qwen3", **sizes}, dtype="fp32")
count_parameters(model, ClusterConfig(platform="cpu"), cpu)
random_hf_state(read_causal_lm(model), 0)

# What is here now is never collected, so that the forked ranks share its memory.
gc.collect()
gc.freeze()

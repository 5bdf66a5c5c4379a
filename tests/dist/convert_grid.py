"""Tiny models of every family, the layouts they are converted for, and what became of each pair.

python -m tests.dist.convert_grid     runs the nightly grid and writes the table of megatron_gcpo/convert/README.md
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BASE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
WIDE = {"head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2.5 tied, biases": {"model_type": "qwen2", **BASE, **TIED},
    "Qwen2.5 untied, biases": {"model_type": "qwen2", **BASE, **UNTIED},
    "Qwen3 tied, q/k norm": {"model_type": "qwen3", **BASE, **WIDE, **TIED},
    "Qwen3 untied, one KV head": {"model_type": "qwen3", **BASE, **WIDE, **UNTIED, "num_key_value_heads": 1},
    "Qwen3-MoE": {"model_type": "qwen3_moe", **BASE, **WIDE, **UNTIED, **EXPERTS, "num_experts": 4},
    "Llama 2, no GQA": {"model_type": "llama", **BASE, **UNTIED, "num_key_value_heads": 4},
    "Llama 3 tied": {"model_type": "llama", **BASE, **TIED},
    "Mistral, window": {"model_type": "mistral", **BASE, **WIDE, **UNTIED, "sliding_window": 5},
    "Gemma 3, windows": {
        "model_type": "gemma3_text",
        **BASE,
        **WIDE,
        **TIED,
        "sliding_window": 5,
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 8,  # the sixth sees everything
    },
    "DeepSeek-V2, MLA": {
        "model_type": "deepseek_v2",
        **BASE,
        **LATENT,
        **UNTIED,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
    },
    "DeepSeek-V3, MLA": {
        "model_type": "deepseek_v3",
        **BASE,
        **LATENT,
        **UNTIED,
        "n_shared_experts": 1,
        "q_lora_rank": 24,
        "n_group": 2,
        "topk_group": 1,
    },
    "GLM-4": {"model_type": "glm4", **BASE, **WIDE, **UNTIED},
    "GLM-4.5 MoE": {
        "model_type": "glm4_moe",
        **BASE,
        **WIDE,
        **UNTIED,
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        **BASE,
        **WIDE,
        **UNTIED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
    },
}
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}
DENSE_LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {},
    "TP2": {"tp": 2},
    "TP4": {"tp": 4},
    "PP2": {"pp": 2},
    "PP2 uneven": {"pp": 2, "megatron": UNEVEN},
    "PP4": {"pp": 4},
    "PP2 VPP2": {"pp": 2, "vpp": 2},
    "TP2 PP2": {"tp": 2, "pp": 2},
    "TP2 PP2 VPP2": {"tp": 2, "pp": 2, "vpp": 2},
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"ep": 2},
    "EP4": {"ep": 4},
    "PP2 EP2": {"pp": 2, "ep": 2},
    "TP2 EP2": {"tp": 2, "ep": 2},
    "TP2 EP4": {"tp": 2, "ep": 4},
    "TP2 ETP2": {"tp": 2, "etp": 2},
}
CI = {
    "Qwen2.5 tied, biases": ("TP2 PP2", "PP2 VPP2"),
    "Qwen3 tied, q/k norm": ("TP2 PP2 VPP2", "PP2 uneven"),
    "Qwen3 untied, one KV head": ("TP4", "TP2 PP2"),
    "Qwen3-MoE": ("TP2 EP4", "PP2 EP2", "TP2 ETP2"),
    "Llama 3 tied": ("1", "PP4"),
    "Mistral, window": ("TP2",),
    "Gemma 3, windows": ("TP2 PP2",),
    "DeepSeek-V2, MLA": ("PP2 EP2",),
    "DeepSeek-V3, MLA": ("TP2 EP2",),
    "GLM-4.5 MoE": ("PP2 EP2",),
    "gpt-oss": ("EP2", "PP2"),
}
FROM_HF = (
    ("Qwen3 untied, one KV head", "TP4"),
    ("Gemma 3, windows", "TP2 PP2"),
    ("DeepSeek-V3, MLA", "TP2 EP2"),
    ("GLM-4.5 MoE", "PP2 EP2"),
    ("gpt-oss", "TP2 EP2"),
)
"""Pairs for which the trainer starts from the Hugging Face folder itself in the CI grid; the nightly one has all."""
SEED = 5
RANKS = 4
"""Of every layout; what it does not cut is replicated."""
ROWS, POSITIONS, SEQUENCES = 2, 16, 2
"""Each row of the trainer's batch holds two sequences of equal length, which must not see each other."""
README = Path(__file__).parents[2] / "megatron_gcpo" / "convert" / "README.md"


def is_nightly() -> bool:
    return os.environ.get("CONVERT_GRID") == "nightly"


def grid(nightly: bool) -> list[tuple[str, str]]:
    """(family, layout) pairs."""
    if not nightly:
        return [(family, layout) for family, layouts in CI.items() for layout in layouts]
    return [(family, layout) for family in FAMILIES for layout in layouts_of(family)]


def layouts_of(family: str) -> dict[str, dict[str, Any]]:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    has_experts = any(name in FAMILIES[family] for name in names)
    return DENSE_LAYOUTS | (EXPERT_LAYOUTS if has_experts else {})


def cluster_of(layout: dict[str, Any]) -> Any:
    from megatron_gcpo.config.records import ClusterConfig

    tp, pp = layout.get("tp", 1), layout.get("pp", 1)
    sizes = {
        "platform": "cpu",
        "processes_per_node": RANKS,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": layout.get("vpp"),
        "expert_model_parallel_size": layout.get("ep", 1),
        "expert_tensor_parallel_size": layout.get("etp", 1),
        "sequence_parallel": tp > 1,
        "collective_timeout_s": 120,
    }
    return ClusterConfig.model_validate(sizes)


def tokens() -> torch.Tensor:
    return torch.randint(0, BASE["vocab_size"], (ROWS, POSITIONS), generator=torch.Generator().manual_seed(SEED))


def folder_name(family: str, layout: str | None = None) -> str:
    return re.sub(r"\W+", "_", family if layout is None else f"{family} {layout}").lower()


def reason(error: Exception) -> str:
    lines = [line.strip("✗ ") for line in str(error).splitlines() if line.strip("✗ ")]
    return lines[0] if lines else type(error).__name__


def convert_all(folder: str, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """In one process: every family as a Hugging Face folder, from it a checkpoint for every layout, and back.

    Returns, for each pair, None or why it was not converted.
    """
    from megatron_gcpo.convert import to_hf, to_megatron
    from megatron_gcpo.convert.work import Options

    root, seen = Path(folder), {}
    options = Options(max_shard_bytes=200_000)
    for family in dict.fromkeys(family for family, _ in pairs):
        write_hf(root / folder_name(family), FAMILIES[family])
    for family, name in pairs:
        layout = layouts_of(family)[name]
        source, target = root / folder_name(family), root / folder_name(family, name)
        try:
            to_megatron.convert(
                source, target, cluster=cluster_of(layout), megatron=layout.get("megatron"), options=options
            )
            to_hf.convert(target, target.with_name(target.name + "_back"), options=options)
            seen[family, name] = None
        except ValueError as error:
            seen[family, name] = reason(error)
    return seen


def write_hf(path: Path, config: dict[str, Any]) -> None:
    """A random model as transformers writes it, in several files, with a tokenizer and a generation config."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from tests.dist.tiny import _write_tokenizer

    values = dict(config)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(values.pop("model_type"), **values), dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # biases and norms start out equal, which would hide a mix-up
            torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name or "sinks" in name else 1.0, std=0.2)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.normal_(std=0.2)
    model.save_pretrained(path, max_shard_size="100KB")
    _write_tokenizer(path)
    GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, eos_token_id=1).save_pretrained(path)


def logits_everywhere(folder: str, pairs: list[tuple[str, str]]) -> dict[Any, Any]:
    """On each of four ranks, for each pair: the largest gap of the trainer's logits to those of transformers.

    The policy starts from the checkpoint that was converted for its layout, and sees packed rows; transformers sees one
    sequence in a row. A string instead: why it could not be built.
    """
    from megatron_gcpo.cluster import platform as platforms

    platform, seen = platforms.install("cpu"), {}
    expected: dict[str, torch.Tensor] = {}
    for family, name in pairs:
        layout = layouts_of(family)[name]
        if family not in expected:
            expected[family] = hf_logits(Path(folder) / folder_name(family))
        start_from = str(Path(folder) / folder_name(family, name))
        try:
            found = megatron_logits(FAMILIES[family], layout, start_from, platform)
        except (ValueError, NotImplementedError) as error:
            seen[family, name] = reason(error)
            continue
        if found is not None:
            seen[family, name] = float((found - expected[family]).abs().max())
    return seen


def start_from_hf_everywhere(folder: str, pairs: list[tuple[str, str]]) -> dict[Any, Any]:
    """On each of four ranks, for each pair: (gap of the logits or None, names of tensors that an export changes).

    The policy starts from the Hugging Face folder itself and is exported as it is pushed to an engine.
    """
    from megatron_gcpo.cluster import platform as platforms
    from megatron_gcpo.config.records import ModelConfig
    from megatron_gcpo.convert.hf_folder import open_folder
    from megatron_gcpo.reshard.gather import export_hf

    platform, seen = platforms.install("cpu"), {}
    for family, name in pairs:
        layout, path = layouts_of(family)[name], Path(folder) / folder_name(family)
        folder_of_family = open_folder(path)

        def look(policy: Any, source: Any = folder_of_family) -> tuple[torch.Tensor | None, list[str]]:
            logits, exported = policy_logits(policy), dict(export_hf(policy))
            changed = [n for n in source.entries if n not in exported or not torch.equal(exported[n], source.read(n))]
            return logits, changed + sorted(exported.keys() - source.entries.keys())

        model = ModelConfig(path=str(path), dtype="fp32", megatron=layout.get("megatron", {}))
        logits, changed = with_policy(model, cluster_of(layout), platform, look)
        gap = None if logits is None else float((logits - hf_logits(path)).abs().max())
        seen[family, name] = (gap, changed)
    return seen


def hf_logits(path: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(tokens().reshape(SEQUENCES * ROWS, -1)).logits.reshape(ROWS, POSITIONS, -1)


def megatron_logits(
    config: dict[str, Any], layout: dict[str, Any], start_from: str, platform: Any
) -> torch.Tensor | None:
    """[R, S, V] on the last stage, None elsewhere."""
    from megatron_gcpo.config.records import ModelConfig

    model = ModelConfig(hf_config=config, dtype="fp32", start_from=start_from, megatron=layout.get("megatron", {}))
    return with_policy(model, cluster_of(layout), platform, policy_logits)


def with_policy(model: Any, cluster: Any, platform: Any, action: Callable[[Any], Any]) -> Any:
    """What ``action`` makes of the policy."""
    from megatron_gcpo.cluster import topology as topologies
    from megatron_gcpo.policy.build import build

    topology = topologies.init(cluster, platform)
    try:
        return action(build(model, cluster, platform))
    finally:
        topology.close()


@torch.no_grad()
def policy_logits(policy: Any) -> torch.Tensor | None:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    from megatron_gcpo.policy.forward import attention_mask

    tokens_RS = tokens()
    positions_RS = torch.arange(POSITIONS).expand(ROWS, -1)
    inputs = {
        "input_ids": tokens_RS,
        "position_ids": positions_RS,
        "attention_mask": attention_mask(1 + positions_RS * SEQUENCES // POSITIONS),
    }

    def step(data: Any, chunk: Any) -> Any:
        next(data)
        return chunk(**inputs), lambda output: (output.sum() * 0, output)

    chunks, iterators = policy.chunks, [iter([None] * RANKS) for _ in policy.chunks]
    found = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=RANKS,  # a multiple of the stages, as interleaved ones want
        seq_length=POSITIONS,
        micro_batch_size=ROWS,
        forward_only=True,
    )
    if not found:
        return None
    return gather_from_tensor_model_parallel_region(found[0])[..., : policy.vocab_size]


def table(converted: dict[Any, Any], gaps: dict[Any, Any]) -> str:
    """Markdown: one row of each family, one cell of each layout."""
    names = list(DENSE_LAYOUTS | EXPERT_LAYOUTS)
    notes: list[str] = []
    rows = ["| family | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for family in FAMILIES:
        cells = []
        for name in names:
            if (family, name) not in converted:
                cells.append("")
                continue
            problem = converted[family, name]
            gap = gaps.get((family, name))
            why = problem or (gap if isinstance(gap, str) else None)
            if why is None:
                cells.append(f"{gap:.0e}")
                continue
            if why not in notes:
                notes.append(why)
            mark = f"[{notes.index(why) + 1}]"
            cells.append(mark if problem else f"exact {mark}")
        rows.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join([*rows, "", *(f"{n}. {note}" for n, note in enumerate(notes, 1))])


def main() -> None:
    """Run the nightly grid and write its table between the markers of the README."""
    from tests.dist.harness import run_ranks

    pairs = grid(nightly=True)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        file, arguments = str(Path(__file__)), {"folder": str(root / "data"), "pairs": pairs}
        (converted,) = run_ranks(file, "convert_all", 1, arguments, root / "convert", timeout_s=1500)
        gaps: dict[Any, Any] = {}
        sound = [pair for pair in pairs if converted[pair] is None]
        # gloo keeps the threads of groups that are left: ranks that saw a hundred layouts would do nothing but switch
        for number, batch in enumerate(itertools.batched(sound, 8)):
            some = arguments | {"pairs": list(batch)}
            for rank in run_ranks(file, "logits_everywhere", RANKS, some, root / f"logits{number}", timeout_s=600):
                gaps |= rank
    text = README.read_text()
    begin, end = "<!-- table begins -->", "<!-- table ends -->"
    head, rest = text.split(begin)
    README.write_text(f"{head}{begin}\n{table(converted, gaps)}\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    sys.exit(main())

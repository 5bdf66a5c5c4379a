"""Checkpoints that plain Megatron-Core wrote: no code of ours takes part in making the model or in saving it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_gcpo.policy.source import TRACKER, find_foreign
from tests.dist.harness import run_ranks
from tests.dist.test_actor import BASE, MODELS, cluster_of, export
from tests.dist.test_checkpoint import failure, start, train

VOCAB = BASE["vocab_size"]
SHAPES = {
    "tied": {"model": "tied", "tp": 2, "vocab": VOCAB + 1},
    "untied": {"model": "untied", "pp": 2, "vocab": VOCAB + 13},
    "llama": {"model": "llama", "tp": 2, "vocab": VOCAB + 61},
    "engine names": {"model": "untied", "tp": 2, "vocab": VOCAB + 1},
    "layers apart": {"model": "tied", "pp": 2, "vocab": VOCAB, "metadata": {"non_homogeneous_layers": True}},
}
"""Who wrote what. engine names: norms where Transformer Engine keeps them; layers apart: each in tensors of its own."""
READERS: dict[str, list[dict[str, Any]]] = {
    "tied": [{"dp": 2}, {"pp": 2, "vpp": 2}],
    "untied": [{"tp": 2, "sp": True}, {"pp": 2}],
    "llama": [{"pp": 2}, {"tp": 2}],
    "engine names": [{"pp": 2}],
    "layers apart": [{"tp": 2}, {"pp": 2, "vpp": 2}],
}


def write(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """A GPTModel of Megatron-Core's local layers, drawn at random and saved; this rank's weights by their names in it."""
    from megatron.core import dist_checkpointing

    from megatron_gcpo.cluster import platform as platforms
    from megatron_gcpo.cluster import topology as topologies

    shape = SHAPES[name]
    cluster = cluster_of(shape)
    topology = topologies.init(cluster, platforms.install("cpu"))
    model = plain_model(MODELS[shape["model"]], shape["vocab"], shape.get("tp", 1), shape.get("pp", 1))
    state = model.sharded_state_dict(prefix="", metadata=shape.get("metadata"))
    if name == "engine names":
        state = {n: renamed(shard) for n, shard in state.items()}
    run = folder / name
    if topology.rank == 0:
        (run / "iter_0000007").mkdir(parents=True)
        (run / TRACKER).write_text("7\n")
    topology.broadcast_object_to_all()
    dist_checkpointing.save({"model": state, "iteration": 7, "args": {"seed": 1}}, str(run / "iter_0000007"))
    topology.broadcast_object_to_all()
    topology.close()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def plain_model(values: dict[str, Any], vocab: int, tp: int, pp: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    model_parallel_cuda_manual_seed(11)
    qk_norm = values["model_type"] == "qwen3"
    config = TransformerConfig(
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        num_attention_heads=values["num_attention_heads"],
        num_query_groups=values["num_key_value_heads"],
        kv_channels=values["head_dim"],
        ffn_hidden_size=values["intermediate_size"],
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=qk_norm,
        layernorm_epsilon=1e-6,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        init_method_std=0.2,
    )
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm"),
        vocab_size=vocab,
        max_sequence_length=512,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=values["tie_word_embeddings"],
        position_embedding_type="rope",
    )
    with torch.no_grad():
        for number, (name, p) in enumerate(model.named_parameters()):
            if "norm" in name:  # all ones would hide a mistaken name
                p.copy_(torch.rand(p.shape, generator=torch.Generator().manual_seed(number)) + 0.5)
    return model


def renamed(shard: Any) -> Any:
    """As Transformer Engine's layers name their norms."""
    key = shard.key.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return replace(shard, key=key.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"))


def work(folder: str) -> dict[str, Any]:
    """On each of two ranks: write every checkpoint, read it on other layouts, and try what cannot work."""
    from megatron_gcpo.policy.model import unwrapped

    results: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        plain = write(Path(folder), name)
        path = str(Path(folder) / name)
        seen: dict[str, Any] = {"exports": [], "plain": plain}
        for layout in [{key: shape[key] for key in ("tp", "pp") if key in shape}, *READERS[name]]:
            actor = start({"model": shape["model"], **layout}, seed=9, start_from=path)
            seen["exports"].append(export(actor))
            seen.setdefault("same_layout", own_parameters(next(unwrapped(actor.policy))))
            if layout in READERS[name]:
                seen["learns"] = not train(actor, 1)[0].skipped
            actor.topology.close()
        results[name] = seen
    root = Path(folder)
    layout = {"pp": 2}
    results["errors"] = {
        "tied in untied": failure(lambda: start({"model": "untied", **layout}, 9, str(root / "tied"))),
        "qwen in llama": failure(lambda: start({"model": "llama", **layout}, 9, str(root / "untied"))),
        "untied in moe": failure(lambda: start({"model": "moe", **layout}, 9, str(root / "untied"))),
    }
    return results


def own_parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("foreign")
    return run_ranks(__file__, "work", 2, {"folder": str(folder / "runs")}, folder / "work", timeout_s=500)


@pytest.mark.parametrize("name", SHAPES)
def test_the_weights_are_the_ones_that_were_saved(name: str, ranks: list[dict[str, Any]]) -> None:
    """On the writer's layout every parameter of the writer's model; on the others, the same Hugging Face tensors."""
    for rank in ranks:
        seen = rank[name]
        assert seen["plain"].keys() == seen["same_layout"].keys()
        for key, plain in seen["plain"].items():
            if "word_embeddings" not in key and "output_layer" not in key:
                assert torch.equal(plain, seen["same_layout"][key]), key
        first = seen["exports"][0]
        for other in seen["exports"][1:]:
            assert other.keys() == first.keys()
            assert all(torch.equal(first[key], other[key]) for key in first)
        assert seen["learns"]


@pytest.mark.parametrize("name", SHAPES)
def test_no_row_of_the_vocabulary_is_misplaced(name: str, ranks: list[dict[str, Any]]) -> None:
    """The writer pads to another size, so that rows lie on other ranks."""
    exported = ranks[0][name]["exports"][-1]
    names = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
    for own, theirs in names.items():
        shards = [rank[name]["plain"][own] for rank in ranks if own in rank[name]["plain"]]
        if theirs in exported:
            assert shards
            whole = torch.cat(shards) if "tp" in SHAPES[name] else shards[0]
            assert torch.equal(exported[theirs], whole[:VOCAB])


def test_another_model_is_refused_on_all_ranks_with_names(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        errors = rank["errors"]
        assert "output_layer.weight is not in it" in errors["tied in untied"]
        assert "q_layernorm.weight is in it and not in the model" in errors["qwen in llama"]
        assert "k_layernorm.weight is in it" in errors["qwen in llama"]
        assert "experts" in errors["untied in moe"]
        assert "is not in it" in errors["untied in moe"]
        for error in errors.values():
            assert "model.start_from" in error
            assert "is of another model" in error


def test_only_a_whole_checkpoint_of_others_is_foreign(tmp_path: Path) -> None:
    assert find_foreign(tmp_path) is None
    for name in (".metadata", "metadata.json"):
        assert find_foreign(tmp_path) is None
        (tmp_path / name).write_text("{}")
    assert find_foreign(tmp_path) == tmp_path
    (tmp_path / "manifest.json").write_text("{}")
    assert find_foreign(tmp_path) is None
    (tmp_path / TRACKER).write_text("12")
    assert find_foreign(tmp_path) is None
    (tmp_path / "iter_0000012").mkdir()
    for name in (".metadata", "metadata.json"):
        (tmp_path / "iter_0000012" / name).write_text("{}")
    assert find_foreign(tmp_path) == tmp_path / "iter_0000012"

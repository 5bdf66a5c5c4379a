"""The planner's counts are those of real models, its activations those that autograd really keeps, its sums its parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_gcpo.cluster.platform import install
from megatron_gcpo.config.records import ClusterConfig, Config, ModelConfig

PLATFORM = install("cpu")

from megatron_gcpo.plan import table  # noqa: E402
from megatron_gcpo.plan.duration import duration, forward_flops_per_token  # noqa: E402
from megatron_gcpo.plan.hardware import GPUS, Efficiency  # noqa: E402
from megatron_gcpo.plan.layouts import legal_layouts, make_plans  # noqa: E402
from megatron_gcpo.plan.memory import layer_activation_bytes, memory, workload  # noqa: E402
from megatron_gcpo.plan.parameters import count_stages  # noqa: E402
from megatron_gcpo.policy.forward import attention_mask  # noqa: E402
from megatron_gcpo.policy.provider import make_provider, read_causal_lm  # noqa: E402
from megatron_gcpo.policy.skeleton import standing_at  # noqa: E402
from tools.plan_run import main  # noqa: E402

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MOE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LATENT = {
    **{key: value for key, value in DENSE.items() if key != "head_dim"},
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
UNEVEN: dict[str, Any] = {"num_layers_in_first_pipeline_stage": 1}


def model(values: dict, dtype: str = "bf16", **megatron) -> ModelConfig:
    return ModelConfig.model_validate({"hf_config": values, "tokenizer": "-", "dtype": dtype, "megatron": megatron})


def cluster(**sizes) -> ClusterConfig:
    return ClusterConfig.model_validate({"platform": "cpu", **sizes})


def recipe(values: dict, **sections) -> Config:
    base = {"model": model(values).model_dump(), "data": {"train": {"kind": "jsonl", "path": "x"}}}
    return Config.model_validate({**base, **sections})


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        (DENSE, {}),
        (DENSE, {"processes_per_node": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
        (MOE, {}),
        (MOE, {"processes_per_node": 4, "expert_model_parallel_size": 4}),
        (MOE, {"processes_per_node": 4, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
        (LATENT, {}),
        (LATENT, {"processes_per_node": 4, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
        (DENSE, {"processes_per_node": 4, "pipeline_model_parallel_size": 4}),
    ],
)
def test_stages_add_up_to_the_hugging_face_model(values: dict, sizes: dict) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    kept = {key: value for key, value in values.items() if key != "model_type"}
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(values["model_type"], **kept))
    layout = cluster(**sizes)
    shape, stages = count_stages(model(values), layout, PLATFORM)
    tp, ep = layout.tensor_model_parallel_size, layout.expert_model_parallel_size
    norms_counted_tp_times = 0
    if tp > 1:  # norms are replicated over tensor-parallel ranks
        norms_counted_tp_times = (tp - 1) * sum(p.numel() for n, p in reference.named_parameters() if "norm" in n)
    total = sum(stage.dense * tp + stage.expert * ep for stage in stages) - norms_counted_tp_times
    assert total == sum(p.numel() for p in reference.parameters())
    experts = {"qwen3": 0, "qwen3_moe": 4, "deepseek_v3": 3}[values["model_type"]]
    assert (shape.num_layers, shape.num_moe_layers) == (4, experts)
    assert [sum(s.layers for s in stages), sum(s.moe_layers for s in stages)] == [4, experts]
    assert all((s.trained_dense, s.trained_expert) == (s.dense, s.expert) for s in stages)


def test_uneven_stages_are_counted_as_they_are_cut() -> None:
    layout = cluster(processes_per_node=2, pipeline_model_parallel_size=2)
    shape, even = count_stages(model(DENSE), layout, PLATFORM)
    _, uneven = count_stages(model(DENSE, **UNEVEN), layout, PLATFORM)
    assert ([s.layers for s in even], [s.layers for s in uneven]) == ([2, 2], [1, 3])
    assert sum(s.total for s in uneven) == sum(s.total for s in even)
    config = recipe(DENSE)
    work = workload(config, None, None, False)
    used = {s.stage: memory(config, layout, shape, (s,), work).kinds["activations"] for s in uneven}
    assert used[1] == pytest.approx(used[0] * 3 / 2), "three layers of one micro-batch, one layer of two"
    slowest = duration(config, layout, shape, uneven, work, GPUS["h100"], Efficiency(), 1e9, False)
    balanced = duration(config, layout, shape, even, work, GPUS["h100"], Efficiency(), 1e9, False)
    assert slowest.phases["update"] > balanced.phases["update"]
    placed = recipe(DENSE).model_copy(update={"model": model(DENSE, **UNEVEN), "cluster": layout})
    assert {c.pipeline_model_parallel_size for c in legal_layouts(placed, shape, 8)} == {2}


def test_of_adapters_only_they_have_gradients() -> None:
    from megatron_gcpo.policy.count import count_parameters

    adapted = ModelConfig.model_validate({**model(DENSE).model_dump(), "lora": {"rank": 4}})
    _, (plain,) = count_stages(model(DENSE), cluster(), PLATFORM)
    shape, stages = count_stages(adapted, cluster(), PLATFORM)
    assert stages[0].total == count_parameters(adapted, cluster(), PLATFORM)[0]
    assert stages[0].trained == stages[0].total - plain.total > 0
    config = recipe(DENSE).model_copy(update={"model": adapted})
    used = memory(config, cluster(), shape, stages, workload(config, None, None, has_reference=True))
    assert used.kinds["grads"] == 4 * stages[0].trained
    assert used.kinds["reference"] == 0, "the model without its adapters"

    def pushed(alone: bool) -> float:
        served = recipe(DENSE, rollout={"engine": "vllm", "vllm": {"lora": alone}}, model=adapted.model_dump())
        work = workload(served, None, None, False)
        spent = duration(served, cluster(), shape, stages, work, GPUS["h100"], Efficiency(), 1e9, False)
        return spent.phases["push"]

    assert pushed(True) / pushed(False) == pytest.approx(stages[0].trained / stages[0].total)


@pytest.mark.parametrize(("values", "norms"), [(DENSE, 64 * 2 + 32 * 2), (LATENT, 64 * 2 + 24 + 32)])
def test_attention_weights_are_those_of_the_model(values: dict, norms: int) -> None:
    values = {**values, "first_k_dense_replace": 4} if values is LATENT else values  # no layer with experts
    shape, (stage,) = count_stages(model(values), cluster(), PLATFORM)
    layer = shape.attention_weights + shape.dense_weights + norms
    assert stage.total == 4 * layer + shape.embeddings + 64


def test_a_cache_holds_heads_once_or_repeated_and_latent_vectors_whole() -> None:
    grouped, _ = count_stages(model(DENSE), cluster(), PLATFORM)
    latent, _ = count_stages(model(LATENT), cluster(), PLATFORM)
    assert [grouped.kv_bytes_per_token(tp) for tp in (1, 2, 8)] == [2 * 2 * 64 * 4, 2 * 2 * 32 * 4, 2 * 2 * 32 * 4]
    assert [latent.kv_bytes_per_token(tp) for tp in (1, 2)] == [2 * (32 + 8) * 4] * 2


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_activations_are_what_autograd_keeps(kv_heads: int) -> None:
    """The difference between two and one layers of Megatron's own model, to 5 per cent (statistics of norms left out)."""
    rows, positions = 2, 128

    def kept_bytes(num_layers: int) -> int:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        settings = model({**DENSE, "num_hidden_layers": num_layers, "num_key_value_heads": kv_heads})
        _, provider = make_provider(settings, cluster(), PLATFORM, read_causal_lm(settings))
        with standing_at(0, cluster()):
            model_parallel_cuda_manual_seed(0)
            (chunk,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
            weights = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
            kept: dict[int, torch.Tensor] = {}

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                if (storage := tensor.untyped_storage().data_ptr()) not in weights:
                    kept[storage] = tensor
                return tensor

            ids = torch.zeros(rows, positions, dtype=torch.int64)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                chunk(
                    input_ids=ids,
                    position_ids=torch.arange(positions).expand(rows, -1),
                    attention_mask=attention_mask(torch.ones_like(ids)),
                )
            return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    shape, _ = count_stages(model({**DENSE, "num_key_value_heads": kv_heads}), cluster(), PLATFORM)
    planned = layer_activation_bytes(
        shape, rows * positions, tp=1, sequence_parallel=False, moe=False, flash=False, positions=positions
    )
    assert planned == pytest.approx(kept_bytes(2) - kept_bytes(1), rel=0.05)


def test_kinds_follow_their_definitions() -> None:
    config = recipe(DENSE, train={"mini_batches": 2}, rollout={"engine": "vllm", "vllm": {"sleep_level": 0}})
    layout = cluster(processes_per_node=8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    shape, stages = count_stages(config.model, layout, PLATFORM)
    used = memory(config, layout, shape, stages, workload(config, None, None, has_reference=True))
    held = stages[used.stage].total
    assert used.kinds["weights"] == used.kinds["reference"] == 2 * held
    assert used.kinds["grads"] == 4 * held
    assert used.kinds["optimizer"] == 12 * held / 2, "fp32 master and two moments, over two replicas"
    assert used.kinds["push buckets"] == 2 * config.rollout.push.bucket_bytes
    assert used.peak == max(used.phase_bytes().values())
    asleep = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(
                update={"vllm": config.rollout.vllm.model_copy(update={"sleep_level": 2})}
            )
        }
    )
    spared = memory(asleep, layout, shape, stages, workload(asleep, None, None, has_reference=True))
    assert [phase for phase, kinds in used.phases.items() if "reference" in kinds] == ["logprobs"], "lent for a pass"
    difference = used.phase_bytes()["backward"] - spared.phase_bytes()["backward"]
    assert difference == pytest.approx(used.kinds["engine weights"])


def test_recomputation_and_sequence_parallelism_save_activations() -> None:
    layout = cluster(processes_per_node=8, tensor_model_parallel_size=4, num_nodes=1)
    shape, stages = count_stages(model({**DENSE, "num_key_value_heads": 4}), layout, PLATFORM)

    def activations(sequence_parallel: bool, **megatron) -> float:
        config = recipe({**DENSE, "num_key_value_heads": 4})
        config = config.model_copy(update={"model": model({**DENSE, "num_key_value_heads": 4}, **megatron)})
        chosen = layout.model_copy(update={"sequence_parallel": sequence_parallel})
        kinds = memory(config, chosen, shape, stages, workload(config, None, None, False)).kinds
        return kinds["activations"] + kinds["layer in work"]

    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert activations(True) < activations(False)
    assert activations(False, **full) < activations(False)
    assert activations(True, **full) < activations(True)


def test_flops_of_a_forward_pass_are_two_per_weight_and_token() -> None:
    shape, (stage,) = count_stages(model(DENSE), cluster(), PLATFORM)
    dense, expert = forward_flops_per_token(shape, mean_context=0)
    products = stage.total - shape.vocab * shape.hidden  # the input embedding is looked up, not multiplied
    assert expert == 0
    assert dense == pytest.approx(2 * products, rel=0.02), "norms are left out"
    sparse, _ = count_stages(model(MOE), cluster(), PLATFORM)
    _, expert = forward_flops_per_token(sparse, 0)
    assert expert == 2 * 4 * (2 * 3 * 64 * 48 + 8 * 64), "two of eight experts and the router in each of four layers"


def test_more_gpus_are_faster_and_every_layout_is_legal() -> None:
    config = recipe(DENSE, rollout={"engine": "vllm", "prompts_per_step": 16})
    counted = count_stages(config.model, cluster(), PLATFORM)
    work = workload(config, None, None, False)
    totals = {}
    for gpus in (8, 16):
        layouts = list(legal_layouts(config, counted[0], gpus))
        assert {(c.tensor_model_parallel_size, c.pipeline_model_parallel_size) for c in layouts} <= {
            (tp, pp) for tp in (1, 2) for pp in (1, 2, 4)
        }
        alone = next(c for c in layouts if (c.tensor_model_parallel_size, c.pipeline_model_parallel_size) == (1, 1))
        (plan,) = make_plans(config, alone, counted, work, GPUS["h100"], Efficiency(), old_logprobs=False)
        assert plan.fits
        totals[gpus] = plan.duration.total
        slower = Efficiency(train=0.2)
        (other,) = make_plans(config, alone, counted, work, GPUS["h100"], slower, old_logprobs=False)
        assert other.duration.phases["update"] == pytest.approx(2 * plan.duration.phases["update"])
    assert totals[16] < totals[8]
    assert replace(work, engine_tp=2).tokens == work.tokens


def test_command_prints_layouts_and_refuses_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"hf_config": {**DENSE, "num_hidden_layers": 2}, "tokenizer": "task", "dtype": "bf16"},
                "data": {"train": {"kind": "task", "name": "addition"}},
                "train": {"optimizer": {"lr": 1e-5}},
                "rollout": {"engine": "vllm"},
            }
        )
    )
    assert main([str(path), "--gpus", "2", "--explain"]) == 0
    printed = capsys.readouterr().out
    for part in ("legal layouts on 2 x h100", "TP1", "memory in backward", "decoding step", "slowest stage"):
        assert part in printed
    for wrong, message in (
        (["--gpus", "12"], "whole number of nodes"),
        (
            ["cluster.platform=cuda", "cluster.context_parallel_size=2", "cluster.processes_per_node=2", "--gpus", "2"],
            "without context parallelism",
        ),
        (["--gpus", "2", "--efficiency", "train=7"], "--efficiency train=7"),
        (["--gpus", "2", "--hf-config", "nowhere.json"], "--hf-config nowhere.json cannot be read"),
    ):
        assert main([str(path), *wrong]) == 2
        assert message in capsys.readouterr().err


def test_the_page_of_plans_is_what_the_planner_says_today() -> None:
    """Its assumptions, and of each recipe that names the page its own layout; the searches are left out for their time."""
    page = table.README.read_text(encoding="utf-8")
    recipes = (table.ROOT / "configs" / "recipe").glob("*.yaml")
    assert {path.stem for path in recipes if "plan/README.md" in path.read_text()} == set(table.NODES)
    assert page.startswith(table.HEAD), "run python -m megatron_gcpo.plan.table"
    assert table.assumptions(Efficiency()) in page
    for name in table.NODES:
        section = table.own_section(name, table.question_of(name))
        assert section in page, f"{name}: run python -m megatron_gcpo.plan.table"
        fits = section.split("| **fits** |")[1].splitlines()[0]
        assert "yes" in [cell.strip() for cell in fits.split("|")], f"{name} fits no kind of GPU"

"""The actor against the Hugging Face model itself: same weights, same global batch, plain autograd in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from megatron_gcpo.config.records import ClusterConfig, ModelConfig, TrainConfig
from megatron_gcpo.types import TokenBatch, TokenStats
from tests.dist.harness import run_ranks

BASE = {
    "vocab_size": 67,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"model_type": "qwen3", "tie_word_embeddings": True, **BASE},
    "untied": {"model_type": "qwen3", "tie_word_embeddings": False, **BASE},
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **BASE},
    "moe": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        **BASE,
    },
}
SEED = 3
TEMPERATURE = 0.8
OPTIMIZER = {"lr": 0.01, "weight_decay": 0.0, "adam_eps": 1e-3, "clip_grad": 0.5}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: dict[str, dict[str, Any]] = {
    "tied": {"model": "tied"},
    "tied-dp2": {"model": "tied", "dp": 2, "packing": False, "max_tokens": 64},
    "tied-tp2": {"model": "tied", "tp": 2, "max_tokens": 96},
    "tied-tp2-sp": {"model": "tied", "tp": 2, "sp": True, "packing": False},
    "tied-pp2": {"model": "tied", "pp": 2, "packing": False, "max_tokens": 64},
    "tied-dp4": {"model": "tied", "dp": 4},
    "tied-tp2-dp2": {"model": "tied", "tp": 2, "dp": 2, "max_tokens": 96},
    "tied-tp2-dp2-sp": {"model": "tied", "tp": 2, "dp": 2, "sp": True, "packing": False},
    "tied-pp2-dp2": {"model": "tied", "pp": 2, "dp": 2, "max_tokens": 48},
    "tied-pp2-vpp2-dp2": {"model": "tied", "pp": 2, "vpp": 2, "dp": 2, "max_tokens": 48},
    "tied-tp2-pp2": {"model": "tied", "tp": 2, "pp": 2, "packing": False, "max_tokens": 64},
    "tied-tp2-pp2-sp": {"model": "tied", "tp": 2, "pp": 2, "sp": True, "max_tokens": 64},
    "tied-tp2-pp2-sp-vpp2-recompute": {"model": "tied", "tp": 2, "pp": 2, "vpp": 2, "sp": True, "max_tokens": 64}
    | {"megatron": RECOMPUTE},
    "tied-tp2-pp2-dp2": {"model": "tied", "tp": 2, "pp": 2, "dp": 2, "max_tokens": 64},
    "tied-tp2-pp2-dp2-sp": {"model": "tied", "tp": 2, "pp": 2, "dp": 2, "sp": True, "packing": False},
    "untied-tp2-pp2": {"model": "untied", "tp": 2, "pp": 2, "max_tokens": 64, "chunk_tokens": 7},
    "untied-tp2-dp2-plain-optimizer": {
        "model": "untied",
        "tp": 2,
        "dp": 2,
        "ddp": {"use_distributed_optimizer": False},
    },
    "untied-dp4-overlap": {"model": "untied", "dp": 4}
    | {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    "llama-tp2-pp2": {"model": "llama", "tp": 2, "pp": 2, "max_tokens": 64},
    "moe-ep2": {"model": "moe", "dp": 2, "ep": 2, "max_tokens": 64},
    "moe-pp2-ep2": {"model": "moe", "pp": 2, "dp": 2, "ep": 2, "max_tokens": 64},
    "moe-tp2-ep4-sp": {"model": "moe", "tp": 2, "dp": 2, "ep": 4, "etp": 1, "sp": True, "max_tokens": 64},
    "tied-tp2-pp2-sp-bf16": {"model": "tied", "tp": 2, "pp": 2, "sp": True, "dtype": "bf16", "max_tokens": 64},
}
"""Layouts (tp, pp, vpp, dp, ep, etp, sp), micro-batch splits (packing, max_tokens) and options; default sizes are 1."""


def global_batch() -> TokenBatch:
    """Twelve ragged rows with prompts, completions, and weights of the global batch."""
    generator = torch.Generator().manual_seed(0)
    lengths_N = torch.tensor([40, 3, 17, 29, 8, 2, 33, 21, 12, 25, 5, 30])
    cu = torch.zeros(len(lengths_N) + 1, dtype=torch.int64)
    cu[1:] = lengths_N.cumsum(0)
    num_tokens = int(cu[-1])
    mask_T = (torch.rand(num_tokens, generator=generator) < 0.7).float()
    mask_T[cu[:-1]] = 0
    return TokenBatch(
        tokens_T=torch.randint(0, BASE["vocab_size"], (num_tokens,), generator=generator),
        cu_seqlens_N1=cu,
        mask_T=mask_T,
        advantages_T=torch.randn(num_tokens, generator=generator) * mask_T,
        group_N=torch.arange(len(lengths_N)) // 4,
        weights_T=torch.rand(num_tokens, generator=generator) * mask_T / 50,
        old_logprobs_T=-3 - torch.rand(num_tokens, generator=generator),
    )


def share(batch: TokenBatch, replica: int, num_replicas: int) -> TokenBatch:
    """Rows of one replica: very uneven, and none for the last of four."""
    ends = {1: [0, 12], 2: [0, 9, 12], 4: [0, 7, 10, 12, 12]}[num_replicas]
    return batch.rows(list(range(ends[replica], ends[replica + 1])))


def token_loss(stats: TokenStats, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ratio_T = torch.exp(stats.logprobs_T - batch.old_logprobs_T)
    loss_T = -batch.advantages_T * ratio_T - 0.3 * stats.entropy_T
    return loss_T, {"ratio": ratio_T, "entropy": stats.entropy_T}


def not_finite_loss(stats: TokenStats, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Infinite on one token of one replica."""
    loss_T, metrics = token_loss(stats, batch)
    return loss_T * torch.where((batch.group_N == 0).any(), torch.inf, 1.0), metrics


def oracle(kind: str) -> dict[str, Any]:
    """Statistics, loss, gradient norm and weights after two clipped Adam updates, by the Hugging Face model."""
    values = dict(MODELS[kind])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    adam = torch.optim.Adam(model.parameters(), lr=OPTIMIZER["lr"], eps=OPTIMIZER["adam_eps"])
    batch = global_batch()
    initial = {name: weight.clone() for name, weight in hf_named_weights(model).items()}
    result: dict[str, Any] = {"initial": initial, "losses": [], "grad_norms": [], "entropy": []}
    for step in range(2):
        stats = hf_statistics(model, batch)
        loss_T, metrics = token_loss(stats, batch)
        loss = (batch.weights_T * loss_T).sum()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])
        if step == 0:
            result["logprobs_T"], result["entropy_T"] = stats.logprobs_T.detach(), stats.entropy_T.detach()
        result["losses"].append(loss.item())
        result["grad_norms"].append(norm.item())
        result["entropy"].append(((metrics["entropy"] * batch.mask_T).sum() / batch.mask_T.sum()).item())
        adam.step()
    result["weights"] = hf_named_weights(model)
    return result


def hf_named_weights(model: Any) -> dict[str, torch.Tensor]:
    return {n: w.detach() for n, w in revert_weight_conversion(model, model.state_dict()).items()}


def hf_statistics(model: Any, batch: TokenBatch) -> TokenStats:
    logprobs, entropies = [], []
    for n in range(batch.num_rows):
        tokens = batch.tokens_T[batch.cu_seqlens_N1[n] : batch.cu_seqlens_N1[n + 1]]
        log_p = (model(tokens[None]).logits[0, :-1].float() / TEMPERATURE).log_softmax(-1)
        zero = torch.zeros(1)
        logprobs.append(torch.cat([zero, log_p.gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(log_p.exp() * log_p).sum(-1)]))
    return TokenStats(logprobs_T=torch.cat(logprobs), entropy_T=torch.cat(entropies))


def export(actor: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.export()}


def work(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """On each rank: every case, in its own process groups."""
    from megatron_gcpo.cluster.platform import install
    from megatron_gcpo.policy.count import count_parameters

    platform, results = install("cpu"), {}
    for name, case in cases.items():
        counts = count_parameters(model_of(case), cluster_of(case), platform)
        results[name] = {"counts": counts, **run_case(case)}
    return results


def num_ranks(case: dict[str, Any]) -> int:
    return case.get("tp", 1) * case.get("pp", 1) * case.get("dp", 1)


def cluster_of(case: dict[str, Any]) -> ClusterConfig:
    return ClusterConfig(
        platform="cpu",
        processes_per_node=num_ranks(case),
        tensor_model_parallel_size=case.get("tp", 1),
        pipeline_model_parallel_size=case.get("pp", 1),
        virtual_pipeline_model_parallel_size=case.get("vpp"),
        expert_model_parallel_size=case.get("ep", 1),
        expert_tensor_parallel_size=case.get("etp"),
        sequence_parallel=case.get("sp", False),
    )


def model_of(case: dict[str, Any]) -> ModelConfig:
    return ModelConfig(
        hf_config=MODELS[case["model"]], dtype=case.get("dtype", "fp32"), megatron=case.get("megatron", {})
    )


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    from megatron_gcpo.cluster import platform as platforms
    from megatron_gcpo.cluster import topology as topologies
    from megatron_gcpo.policy.actor import Actor
    from megatron_gcpo.policy.build import build
    from megatron_gcpo.policy.reference import Reference

    platform, cluster = platforms.install("cpu"), cluster_of(case)
    topology = topologies.init(cluster, platform)
    train = TrainConfig(
        max_tokens_per_micro_batch=case.get("max_tokens", 512),
        packing=case.get("packing", True),
        logits_chunk_tokens=case.get("chunk_tokens", 2048),
        optimizer=OPTIMIZER,
        ddp=case.get("ddp", {}),
    )
    policy = build(model_of(case), cluster, platform, ddp=train.ddp, seed=SEED)
    actor = Actor(policy, topology, train, temperature=TEMPERATURE, total_updates=10)
    reference = Reference(actor)
    batch = share(global_batch(), topology.replica, topology.dp_size)

    initial = export(actor)
    stats = actor.logprobs(batch)
    updates = [actor.update(batch, token_loss, entropies=True)]
    before = export(actor)
    # None of these may leave a trace: the next update must be the oracle's second one.
    refused = actor.update(batch, not_finite_loss)
    idle = actor.update(batch.rows([]), token_loss)
    starting = reference.logprobs(batch)
    untouched = all(torch.equal(tensor, before[name]) for name, tensor in export(actor).items())
    updates.append(actor.update(batch, token_loss))
    result = {
        "replica": (topology.replica, topology.dp_size),
        "num_parameters": sum(p.numel() for chunk in policy.chunks for p in chunk.parameters()),
        "initial": initial if topology.rank == topology.world_size - 1 else None,
        "stats": stats,
        "updates": updates,
        "refused": refused,
        "idle": idle,
        "untouched": untouched,
        "num_updates": (actor.num_updates, actor.num_skipped),
        "starting": starting,
        "weights": export(actor) if topology.rank == topology.world_size // 2 else export(actor) and None,
    }
    topology.close()
    return result


Results = dict[str, list[dict[str, Any]]]
"""Case -> what each of its ranks returned."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    found: Results = {}
    for size in sorted({num_ranks(case) for case in CASES.values()}):
        cases = {name: case for name, case in CASES.items() if num_ranks(case) == size}
        folder = Path(tmp_path_factory.mktemp(f"actor{size}_"))
        ranks = run_ranks(__file__, "work", size, {"cases": cases}, folder, timeout_s=600)
        found |= {name: [rank[name] for rank in ranks] for name in cases}
    return found


@pytest.fixture(scope="module")
def oracles() -> dict[str, dict[str, Any]]:
    return {kind: oracle(kind) for kind in MODELS}


@pytest.mark.parametrize("name", [name for name in CASES if "bf16" not in name])
def test_actor_is_the_hugging_face_model(name: str, results: Results, oracles: dict[str, dict[str, Any]]) -> None:
    """Every layout, split and packing gives the oracle's statistics, losses, gradient norms and updated weights.

    The second update follows a step that was refused for its infinite loss: that one left no trace.
    """
    expected = oracles[CASES[name]["model"]]
    for got in results[name]:
        own_T = own_tokens(*got["replica"])
        for field in ("logprobs_T", "entropy_T"):
            torch.testing.assert_close(getattr(got["stats"], field), expected[field][own_T], rtol=1e-5, atol=2e-5)
        first, second = (update.entropy_T for update in got["updates"])
        torch.testing.assert_close(first, expected["entropy_T"][own_T], rtol=1e-5, atol=2e-5)
        assert second is None, "nobody asked"
        for update, loss, norm, entropy in zip(
            got["updates"], expected["losses"], expected["grad_norms"], expected["entropy"], strict=True
        ):
            assert not update.skipped
            assert update.loss == pytest.approx(loss, rel=1e-5)
            assert update.grad_norm == pytest.approx(norm, rel=1e-5)
            assert update.metrics["entropy"] == pytest.approx(entropy, rel=1e-5)
            assert update.learning_rate == OPTIMIZER["lr"]
        if got["weights"] is not None:
            wanted = without_tied(expected["weights"], name)
            assert got["weights"].keys() == wanted.keys()
            for key, value in wanted.items():
                torch.testing.assert_close(got["weights"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_export_returns_the_weights_bit_for_bit(
    name: str, results: Results, oracles: dict[str, dict[str, Any]]
) -> None:
    got = results[name][-1]["initial"]
    wanted = without_tied(oracles[CASES[name]["model"]]["initial"], name)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(got[key], value.to(got[key].dtype)), key


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_is_not_finite_is_skipped_everywhere(name: str, results: Results) -> None:
    for got in results[name]:
        assert got["refused"].skipped
        assert not math.isfinite(got["refused"].loss)
        assert got["untouched"]
        assert got["num_updates"] == (2, 1)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_without_trained_tokens_is_no_update(name: str, results: Results) -> None:
    """Momentum alone would move the weights; that the schedule and the moments stay shows in the next update."""
    for got in results[name]:
        idle = got["idle"]
        assert (idle.loss, idle.grad_norm, idle.skipped) == (0.0, 0.0, False)
        assert idle.metrics == {"ratio": 0.0, "entropy": 0.0}
        assert got["untouched"]


@pytest.mark.parametrize("name", CASES)
def test_the_reference_scores_like_the_starting_policy(name: str, results: Results) -> None:
    """Bit for bit, although the model has been trained since; and it gives the trained weights back as they were."""
    for got in results[name]:
        assert torch.equal(got["starting"].logprobs_T, got["stats"].logprobs_T)
        assert torch.equal(got["starting"].entropy_T, got["stats"].entropy_T)
        assert got["untouched"]


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_counted_without_processes(name: str, results: Results) -> None:
    assert results[name][0]["counts"] == [rank["num_parameters"] for rank in results[name]]


@pytest.mark.parametrize("name", [name for name in CASES if "bf16" in name])
def test_bf16_stays_near_the_oracle(name: str, results: Results, oracles: dict[str, dict[str, Any]]) -> None:
    """bf16 has 8 bits: statistics within a few hundredths, and a first update of the same size and direction."""
    expected = oracles[CASES[name]["model"]]
    for got in results[name]:
        gap_T = (got["stats"].logprobs_T - expected["logprobs_T"][own_tokens(*got["replica"])]).abs()
        assert gap_T.numel() == 0 or gap_T.mean() < 0.05
        assert got["updates"][0].loss == pytest.approx(expected["losses"][0], rel=0.05)
        assert got["updates"][0].grad_norm == pytest.approx(expected["grad_norms"][0], rel=0.1)


def own_tokens(replica: int, num_replicas: int) -> torch.Tensor:
    """[T] the tokens of the global batch that a replica has, in its order."""
    batch = global_batch()
    numbered = replace(batch, advantages_T=torch.arange(len(batch.tokens_T)).float())
    return share(numbered, replica, num_replicas).advantages_T.long()


def without_tied(weights: dict[str, torch.Tensor], case: str) -> dict[str, torch.Tensor]:
    tied = MODELS[CASES[case]["model"]]["tie_word_embeddings"]
    return {name: weight for name, weight in weights.items() if not (tied and name == "lm_head.weight")}

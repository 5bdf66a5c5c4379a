"""Adapters against plain autograd through the Hugging Face model, and PEFT's own reading of what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_gcpo.config.records import LoraConfig, ModelConfig, TrainConfig
from megatron_gcpo.types import TokenStats
from tests.dist.harness import run_ranks
from tests.dist.test_actor import (
    MODELS,
    RECOMPUTE,
    SEED,
    TEMPERATURE,
    cluster_of,
    export,
    global_batch,
    hf_named_weights,
    num_ranks,
    own_tokens,
    share,
    token_loss,
)
from tests.dist.test_checkpoint import failure

LORA = {"rank": 4, "alpha": 6}
TRAIN = {
    "max_tokens_per_micro_batch": 96,
    "optimizer": {"lr": 0.02, "weight_decay": 0.0, "adam_eps": 1e-3, "clip_grad": 0.5},
}
STEPS = 3
"""B starts at zero, so A moves from the second update on."""
ATTENTION = {"target_modules": ("linear_qkv", "linear_proj")}
CASES: dict[str, dict[str, Any]] = {
    "tied": {"model": "tied"},
    "tied-recompute": {"model": "tied", "megatron": RECOMPUTE},
    "tied-dp2": {"model": "tied", "dp": 2},
    "tied-tp2": {"model": "tied", "tp": 2},
    "tied-tp2-sp": {"model": "tied", "tp": 2, "sp": True},
    "untied-pp2": {"model": "untied", "pp": 2},
    "tied-tp2-pp2-vpp2-sp": {"model": "tied", "tp": 2, "pp": 2, "vpp": 2, "sp": True},
    "llama-tp2-pp2": {"model": "llama", "tp": 2, "pp": 2},
    "untied-tp2-dp2-plain-optimizer": {
        "model": "untied",
        "tp": 2,
        "dp": 2,
        "ddp": {"use_distributed_optimizer": False},
    },
    "tied-attention": {"model": "tied", "tp": 2, "lora": ATTENTION},
    "moe-ep2-attention": {"model": "moe", "dp": 2, "ep": 2, "lora": ATTENTION},
    "moe-tp2-ep2-sp-attention": {"model": "moe", "tp": 2, "dp": 2, "ep": 2, "etp": 1, "sp": True, "lora": ATTENTION},
}


def model_of(case: dict[str, Any], **more: Any) -> ModelConfig:
    lora = LoraConfig(**(LORA | case.get("lora", {})))
    settings = {"dtype": case.get("dtype", "fp32"), "megatron": case.get("megatron", {}), "lora": lora}
    return ModelConfig(**({"hf_config": MODELS[case["model"]], **settings} | more))


def start(case: dict[str, Any], seed: int = SEED, **more: Any) -> Any:
    from megatron_gcpo.cluster import platform as platforms
    from megatron_gcpo.cluster import topology as topologies
    from megatron_gcpo.policy.actor import Actor
    from megatron_gcpo.policy.build import build

    platform, cluster = platforms.install("cpu"), cluster_of(case)
    topology = topologies.init(cluster, platform)
    train = TrainConfig(**TRAIN, ddp=case.get("ddp", {}))
    try:
        policy = build(model_of(case, **more), cluster, platform, ddp=train.ddp, seed=seed)
    except ValueError:
        topology.close()
        raise
    return Actor(policy, topology, train, temperature=TEMPERATURE, total_updates=10)


def work(cases: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    """On each rank, for every case: start, three updates, and what can be seen of the policy in between."""
    from megatron_gcpo.cluster.platform import install
    from megatron_gcpo.policy.count import count_parameters
    from megatron_gcpo.policy.lora import export_adapters
    from megatron_gcpo.policy.reference import Reference

    results: dict[str, Any] = {}
    if num_ranks(next(iter(cases.values()))) == 2:
        experts = {"model": "moe", "dp": 2, "ep": 2}
        results["refused experts"] = failure(lambda: start(experts))
    for name, case in cases.items():
        counts = count_parameters(model_of(case), cluster_of(case), install("cpu"))
        actor = start(case)
        batch = share(global_batch(), actor.topology.replica, actor.topology.dp_size)
        reference = Reference(actor)
        fresh = {n: w.clone() for n, w in export_adapters(actor.policy)}
        initial = export(actor)
        updates = [actor.update(batch, token_loss) for _ in range(STEPS)]
        trained = actor.logprobs(batch)
        results[name] = {
            "replica": (actor.topology.replica, actor.topology.dp_size),
            "counts": counts,
            "num_parameters": sum(p.numel() for c in actor.policy.chunks for p in c.parameters()),
            "trained_parameters": sum(
                p.numel() for c in actor.policy.chunks for p in c.parameters() if p.requires_grad
            ),
            "optimized": sum(p.numel() for group in actor.optimizer.param_groups for p in group["params"]),
            "base": actor.policy.adapters.base,
            "initial": initial,
            "fresh": fresh,
            "adapters": {n: w.clone() for n, w in export_adapters(actor.policy)},
            "updates": updates,
            "trained": trained,
            "starting": reference.logprobs(batch),
            "same_after_reference": torch.equal(actor.logprobs(batch).logprobs_T, trained.logprobs_T),
            "weights": export(actor),
        }
        actor.topology.close()
    return results


Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    found: Results = {}
    for size in sorted({num_ranks(case) for case in CASES.values()}):
        cases = {name: case for name, case in CASES.items() if num_ranks(case) == size}
        folder = Path(tmp_path_factory.mktemp(f"lora{size}_"))
        ranks = run_ranks(__file__, "work", size, {"cases": cases, "folder": str(folder)}, folder, timeout_s=500)
        found |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return found


def oracle(kind: str, fresh: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The Hugging Face model with W + alpha / rank B A in place of each adapted W, by autograd through B and A.

    fresh: the exported adapters at the start; q, k and v (gate and up) of a layer share one A.
    """
    values = dict(MODELS[kind])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    base = {name: p.detach() for name, p in model.named_parameters()}
    inner, outer = {}, {}
    for name, tensor in fresh.items():
        matrix = name.split(".lora_")[0]
        if ".lora_A." in name:
            inner.setdefault(shared(matrix), tensor.clone().requires_grad_(True))
        else:
            outer[matrix] = tensor.clone().requires_grad_(True)
    adam = torch.optim.Adam([*inner.values(), *outer.values()], lr=TRAIN["optimizer"]["lr"], eps=1e-3)
    scale = LORA["alpha"] / LORA["rank"]

    def adapted() -> dict[str, torch.Tensor]:
        changed = {f"{m}.weight": base[f"{m}.weight"] + scale * outer[m] @ inner[shared(m)] for m in outer}
        return {**base, **changed}

    batch, result = global_batch(), {"losses": [], "grad_norms": []}
    for step in range(STEPS + 1):
        stats = statistics(model, adapted(), batch)
        if step == 0:
            result["starting_T"] = stats.logprobs_T.detach()
        if step == STEPS:
            result["trained_T"] = stats.logprobs_T.detach()
            break
        loss = (batch.weights_T * token_loss(stats, batch)[0]).sum()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*inner.values(), *outer.values()], 0.5)
        result["losses"].append(loss.item())
        result["grad_norms"].append(norm.item())
        adam.step()
    changed = {name: w.detach() for name, w in adapted().items()}
    model.load_state_dict(changed, strict=False)
    result["weights"] = hf_named_weights(model)
    result["adapters"] = {f"{m}.lora_A.weight": inner[shared(m)].detach() for m in outer}
    result["adapters"] |= {f"{m}.lora_B.weight": w.detach() for m, w in outer.items()}
    return result


def shared(matrix: str) -> str:
    """Which A a matrix has."""
    parent, name = matrix.rsplit(".", 1)
    groups = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "fc1", "up_proj": "fc1"}
    return f"{parent}.{groups.get(name, name)}"


def statistics(model: Any, weights: dict[str, torch.Tensor], batch: Any) -> TokenStats:
    logprobs, entropies = [], []
    for n in range(batch.num_rows):
        tokens = batch.tokens_T[batch.cu_seqlens_N1[n] : batch.cu_seqlens_N1[n + 1]]
        logits = functional_call(model, weights, (tokens[None],)).logits[0, :-1]
        log_p = (logits / TEMPERATURE).log_softmax(-1)
        logprobs += [torch.zeros(1), log_p.gather(1, tokens[1:, None])[:, 0]]
        entropies += [torch.zeros(1), -(log_p.exp() * log_p).sum(-1)]
    return TokenStats(logprobs_T=torch.cat(logprobs), entropy_T=torch.cat(entropies))


@pytest.fixture(scope="module")
def oracles(results: Results) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    known: dict[tuple[str, int], dict[str, Any]] = {}
    for name in CASES:
        ranks = results[name]
        key = (CASES[name]["model"], len(ranks[0]["fresh"]))
        if key not in known:
            known[key] = oracle(key[0], ranks[0]["fresh"])
        found[name] = known[key]
    return found


@pytest.mark.parametrize("name", CASES)
def test_adapters_learn_as_by_autograd(name: str, results: Results, oracles: dict[str, dict[str, Any]]) -> None:
    """Losses, gradient norms, log-probs, merged weights and adapters, for every layout."""
    expected = oracles[name]
    for got in results[name]:
        own_T = own_tokens(*got["replica"])
        torch.testing.assert_close(got["trained"].logprobs_T, expected["trained_T"][own_T], rtol=1e-4, atol=1e-4)
        for update, loss, norm in zip(got["updates"], expected["losses"], expected["grad_norms"], strict=True):
            assert update.loss == pytest.approx(loss, rel=1e-4)
            assert update.grad_norm == pytest.approx(norm, rel=1e-4)
        for key, value in got["weights"].items():
            torch.testing.assert_close(value, expected["weights"][key], rtol=1e-3, atol=2e-5, msg=key)
        assert got["adapters"].keys() == expected["adapters"].keys()
        for key, value in expected["adapters"].items():
            torch.testing.assert_close(got["adapters"][key], value, rtol=1e-3, atol=2e-5, msg=key)


@pytest.mark.parametrize("name", CASES)
def test_only_adapters_are_trained_and_the_reference_is_the_model(
    name: str, results: Results, oracles: dict[str, dict[str, Any]]
) -> None:
    lora = LoraConfig(**(LORA | CASES[name].get("lora", {})))
    touched = {"linear_qkv": "q k v", "linear_proj": "o", "linear_fc1": "gate up", "linear_fc2": "down"}
    words = " ".join(touched[target] for target in lora.target_modules).split()
    for got in results[name]:
        assert 0 < got["trained_parameters"] < got["num_parameters"] / 4
        for key, value in got["initial"].items():
            moved = not torch.equal(value, got["weights"][key])
            assert moved == any(f".{word}_proj." in key for word in words), key
        torch.testing.assert_close(
            got["starting"].logprobs_T, oracles[name]["starting_T"][own_tokens(*got["replica"])], rtol=1e-5, atol=2e-5
        )
        assert got["same_after_reference"]


@pytest.mark.parametrize("name", CASES)
def test_adapters_are_counted_without_processes(name: str, results: Results) -> None:
    assert results[name][0]["counts"] == [rank["num_parameters"] for rank in results[name]]


def test_the_same_seed_gives_the_same_start_on_every_layout(results: Results) -> None:
    """Adapters bit for bit, and one fingerprint of the frozen weights, though the vocabulary of 67 is padded by TP."""
    for kind in ("tied", "untied", "llama", "moe"):
        ranks = [got for name in CASES if CASES[name]["model"] == kind for got in results[name]]
        assert len({got["base"] for got in ranks}) == 1
        for got in ranks:
            for key, value in got["fresh"].items():
                reference = next(other["fresh"][key] for other in ranks if key in other["fresh"])
                assert torch.equal(value, reference), key
    assert len({results[name][0]["base"] for name in CASES}) == 4


def test_experts_are_refused(results: dict[str, Any]) -> None:
    for error in results["refused experts"]:
        assert "linear_fc1, linear_fc2: adapters on the experts of a mixture are not supported (megatron-" in error
        assert "set it to [linear_qkv, linear_proj]" in error

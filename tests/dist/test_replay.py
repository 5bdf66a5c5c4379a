"""Routing replay against the Hugging Face model with its experts forced, and against the engine that recorded them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_gcpo.config.records import TrainConfig
from megatron_gcpo.types import TokenBatch
from tests.dist import test_actor as plain
from tests.dist.harness import run_ranks

MOE = plain.MODELS["moe"]
LAYERS, EXPERTS, K = MOE["num_hidden_layers"], MOE["num_experts"], MOE["num_experts_per_tok"]
CASES: dict[str, dict[str, Any]] = {
    "ep2": {"dp": 2, "ep": 2, "max_tokens": 64},
    "ep2-recompute-unpacked": {"dp": 2, "ep": 2, "max_tokens": 64, "packing": False, "megatron": plain.RECOMPUTE},
    "pp2-ep2": {"pp": 2, "dp": 2, "ep": 2, "max_tokens": 48},
    "pp2-vpp2-ep2-recompute": {"pp": 2, "vpp": 2, "dp": 2, "ep": 2, "max_tokens": 48, "megatron": plain.RECOMPUTE},
    "pp2-ep2-recompute-experts": {"pp": 2, "dp": 2, "ep": 2, "max_tokens": 48}
    | {"megatron": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
    "tp2-ep4-sp": {"tp": 2, "dp": 2, "ep": 4, "etp": 1, "sp": True, "max_tokens": 64},
    "tp2-pp2-ep2-sp-recompute": {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sp": True, "max_tokens": 64}
    | {"megatron": plain.RECOMPUTE},
}


def routed_batch() -> TokenBatch:
    """The batch of the actor's tests, each token sent to two random experts; a fifth of the tokens unknown."""
    batch = plain.global_batch()
    generator = torch.Generator().manual_seed(1)
    num_tokens = len(batch.tokens_T)
    experts_TLk = torch.rand(num_tokens, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :K]
    experts_TLk[torch.rand(num_tokens, generator=generator) < 0.2] = -1
    experts_TLk[batch.cu_seqlens_N1[1:] - 1] = -1
    return replace(batch, routed_experts_T=experts_TLk.to(torch.int16))


@contextmanager
def forced(model: Any, experts_TLk: torch.Tensor, agreed: list[torch.Tensor]) -> Iterator[None]:
    """The model's experts are these where known; ``agreed`` receives how many of each token's are its router's own."""

    def hook(layer: int) -> Any:
        def force(gate: Any, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            logits_TE, _, own_Tk = output
            wanted_Tk = experts_TLk[:, layer].long()
            chosen_Tk = torch.where(wanted_Tk < 0, own_Tk, wanted_Tk)
            same_T = (chosen_Tk[:, :, None] == own_Tk[:, None, :]).any(-1).sum(-1)
            agreed.append(same_T[wanted_Tk[:, 0] >= 0])
            weights_Tk = logits_TE.softmax(-1).gather(1, chosen_Tk)
            assert not gate.norm_topk_prob
            return logits_TE, weights_Tk, chosen_Tk

        return force

    handles = [block.mlp.gate.register_forward_hook(hook(i)) for i, block in enumerate(model.model.layers)]
    yield
    for handle in handles:
        handle.remove()


def hf_model() -> Any:
    values = dict(MOE)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(plain.SEED)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    """Statistics, losses, norms, agreement and weights after two updates with forced experts, in one process."""
    model = hf_model()
    adam = torch.optim.Adam(model.parameters(), lr=plain.OPTIMIZER["lr"], eps=plain.OPTIMIZER["adam_eps"])
    batch = routed_batch()
    result: dict[str, Any] = {"losses": [], "grad_norms": [], "agreement": []}
    for _ in range(2):
        agreed: list[torch.Tensor] = []
        rows = []
        for n in range(batch.num_rows):
            row = batch.rows([n])
            with forced(model, row.routed_experts_T, agreed):
                rows.append(plain.hf_statistics(model, row))
        stats = replace(
            rows[0],
            logprobs_T=torch.cat([s.logprobs_T for s in rows]),
            entropy_T=torch.cat([s.entropy_T for s in rows]),
        )
        loss_T, _ = plain.token_loss(stats, batch)
        loss = (batch.weights_T * loss_T).sum()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), plain.OPTIMIZER["clip_grad"])
        result.setdefault("logprobs_T", stats.logprobs_T.detach())
        result["losses"].append(loss.item())
        result["grad_norms"].append(norm.item())
        result["agreement"].append(torch.cat(agreed).double().mean().item() / K)
        adam.step()
    result["weights"] = plain.hf_named_weights(model)
    result["own_logprobs_T"] = plain.hf_statistics(hf_model(), batch).logprobs_T.detach()
    return result


def work(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """On each rank: every case, in its own process groups."""
    return {name: run_case({"model": "moe", **case}) for name, case in cases.items()}


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    from megatron_gcpo.cluster import platform as platforms
    from megatron_gcpo.cluster import topology as topologies
    from megatron_gcpo.policy.actor import Actor
    from megatron_gcpo.policy.build import build

    platform, cluster = platforms.install("cpu"), plain.cluster_of(case)
    topology = topologies.init(cluster, platform)
    train = TrainConfig(
        max_tokens_per_micro_batch=case["max_tokens"],
        packing=case.get("packing", True),
        optimizer=plain.OPTIMIZER,
    )

    def actor(router_replay: bool) -> Actor:
        policy = build(plain.model_of(case), cluster, platform, seed=plain.SEED)
        return Actor(
            policy,
            topology,
            train,
            temperature=plain.TEMPERATURE,
            total_updates=10,
            router_replay=router_replay,
        )

    replica = (topology.replica, topology.dp_size)
    batch = plain.share(routed_batch(), *replica)
    unrouted = plain.share(plain.global_batch(), *replica)
    result: dict[str, Any] = {"replica": replica, "recorded": recorded(actor(True))}
    with_replay, without = actor(True), actor(False)
    result["stats"] = with_replay.logprobs(batch)
    result["off"] = [
        (with_replay.logprobs(unrouted), with_replay.update(unrouted, plain.token_loss), plain.export(with_replay)),
        (without.logprobs(unrouted), without.update(unrouted, plain.token_loss), plain.export(without)),
    ]
    del with_replay, without
    again = actor(True)
    result["updates"] = [again.update(batch, plain.token_loss) for _ in range(2)]
    result["weights"] = plain.export(again)
    topology.close()
    return result


def recorded(actor: Any) -> dict[str, Any] | None:
    """On leaders: what an engine with the actor's weights drew and recorded, and the actor's replay of it."""
    from megatron_gcpo.credit.tokens import rollout_batch
    from megatron_gcpo.reshard import push
    from megatron_gcpo.rollout import Sampling, generate_groups
    from megatron_gcpo.rollout.transformers_engine import TransformersEngine
    from megatron_gcpo.types import Credit, Prompt

    topology, engine, sent = actor.topology, None, None
    if topology.is_leader:
        engine = TransformersEngine(
            actor.policy.hf_config,
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_batch_rows=5,
            return_routed_experts=True,
        )
    push(actor.export(), engine)
    if engine is not None:
        prompts = [
            Prompt(id=str(p), token_ids=tuple(range(3 * p + 1, 5 * p + 2)), text="", answer="") for p in range(1, 4)
        ]
        sampling = Sampling(temperature=plain.TEMPERATURE, stop_token_ids=tuple(range(40, 50)))
        groups = generate_groups(
            engine,
            prompts,
            group_size=3,
            max_new_tokens=9,
            sampling=sampling,
            decode=str,
            run_seed=topology.replica,
            step=0,
        )
        zeros_G = torch.zeros(3, dtype=torch.float64)
        sent = rollout_batch(groups, [Credit(credits_G=zeros_G, advantages_G=zeros_G)] * len(groups))
    batch = topology.broadcast_object(sent)
    replayed = actor.logprobs(batch)
    batch = replace(batch, weights_T=torch.zeros_like(batch.mask_T), old_logprobs_T=replayed.logprobs_T)
    agreement = actor.update(batch, lambda stats, _: (stats.logprobs_T, {})).metrics["router_agreement"]
    gap_T = (replayed.logprobs_T - batch.rollout_logprobs_T) * batch.mask_T
    unknown_T = (batch.routed_experts_T < 0).all(-1).all(-1)
    last_T = torch.zeros_like(unknown_T)
    last_T[batch.cu_seqlens_N1[1:] - 1] = True
    return {
        "gap": gap_T.abs().max().item(),
        "agreement": agreement,
        "only_last_unknown": torch.equal(unknown_T, last_T),
        "num_tokens": int(batch.mask_T.sum()),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for size in (2, 4):
        cases = {name: case for name, case in CASES.items() if plain.num_ranks(case) == size}
        ranks = run_ranks(__file__, "work", size, {"cases": cases}, Path(tmp_path_factory.mktemp("replay")))
        found |= {name: [rank[name] for rank in ranks] for name in cases}
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_follows_forced_routing_exactly(name: str, results: Any, oracle: dict[str, Any]) -> None:
    """Log-probs, losses, gradient norms, agreement and trained weights, under every layout and kind of recomputation."""
    moved = (oracle["logprobs_T"] - oracle["own_logprobs_T"]).abs()
    assert moved.mean() > 0.05, "the forced routing must matter"
    for got in results[name]:
        own_T = plain.own_tokens(*got["replica"])
        torch.testing.assert_close(got["stats"].logprobs_T, oracle["logprobs_T"][own_T], rtol=1e-5, atol=2e-5)
        for step, update in enumerate(got["updates"]):
            assert update.loss == pytest.approx(oracle["losses"][step], rel=1e-5)
            assert update.grad_norm == pytest.approx(oracle["grad_norms"][step], rel=1e-5)
            assert update.metrics["router_agreement"] == pytest.approx(oracle["agreement"][step], abs=1e-9)
        for key, value in oracle["weights"].items():
            torch.testing.assert_close(got["weights"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_replaying_the_engine_s_own_routing_gives_its_logprobs(name: str, results: Any) -> None:
    """Equal weights: the trainer would have chosen alike, and says of every drawn token what the engine said."""
    for got in results[name]:
        assert got["recorded"]["only_last_unknown"]
        assert got["recorded"]["num_tokens"] > 30
        assert got["recorded"]["agreement"] == 1.0
        assert got["recorded"]["gap"] < 2e-5


@pytest.mark.parametrize("name", CASES)
def test_without_routing_in_the_batch_nothing_changes(name: str, results: Any) -> None:
    for got in results[name]:
        (stats, update, weights), (plain_stats, plain_update, plain_weights) = got["off"]
        assert torch.equal(stats.logprobs_T, plain_stats.logprobs_T)
        assert update == plain_update
        assert all(torch.equal(weights[key], plain_weights[key]) for key in plain_weights)

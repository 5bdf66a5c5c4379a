"""Every method on two layouts: loss, gradient and numbers of phase one are those of the Hugging Face model in one process.

The learning rate is 0, so that one policy serves all methods in turn; the norm of the gradient stands for the gradient.
Replicas have one group and three, their micro-batches are cut differently, and with pipeline stages only the last one sees
statistics.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_gcpo.config.records import ClusterConfig, ModelConfig, TrainConfig
from megatron_gcpo.loss import count, token_weights
from megatron_gcpo.methods import METHODS, Method, MethodOptions, Scope, prepare, without_unsampled
from megatron_gcpo.policy.manifest import read_extra
from megatron_gcpo.types import TokenBatch, TokenStats
from tests.dist.harness import run_ranks
from tests.dist.tiny import write_recipe
from tests.unit.methods.world import accuracy, chosen, credited_batch, head_gram, make_world

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 19,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
SEED, TEMPERATURE, MAX_TOKENS, STEP, STEPS = 5, 0.8, 9, 1, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-dp2": {"cluster": {"tensor_model_parallel_size": 2}, "max_tokens": 24, "packing": True},
    "pp2-dp2": {"cluster": {"pipeline_model_parallel_size": 2}, "max_tokens": 40, "packing": False},
}
WORLD = make_world(lengths=lambda rng: int(rng.integers(1, MAX_TOKENS)))


def scored(
    method: Method, options: MethodOptions, batch: TokenBatch, stats: TokenStats
) -> tuple[TokenBatch, TokenStats]:
    """The batch before phase one; the old policy is a little off, except where a method wants the current one."""
    place_T = torch.arange(len(batch.tokens_T)) - batch.cu_seqlens_N1[:-1].repeat_interleave(batch.lengths_N)
    phase_T = 3.0 * batch.tokens_T + 7.0 * place_T
    one_update = method.one_update or any(part.name == "opefo" for part in options.token_credit)
    old_T = stats.logprobs_T + (0.0 if one_update else 0.1) * torch.sin(phase_T) * batch.mask_T
    reference_T = (stats.logprobs_T - 0.2 * torch.cos(phase_T) * batch.mask_T).float()
    held = "ref_logprobs" in method.needs_for(options)
    batch = replace(batch, old_logprobs_T=old_T.float(), ref_logprobs_T=reference_T if held else None)
    return without_unsampled(batch), replace(stats, logprobs_T=old_T)


def work(layouts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """On each rank: every layout, and every method in it."""
    from megatron_gcpo.cluster import platform as platforms
    from megatron_gcpo.cluster import topology as topologies
    from megatron_gcpo.policy.actor import Actor
    from megatron_gcpo.policy.build import build
    from megatron_gcpo.policy.scale import weights

    platform, results = platforms.install("cpu"), {}
    for layout, case in layouts.items():
        cluster = ClusterConfig(platform="cpu", processes_per_node=4, **case["cluster"])
        topology = topologies.init(cluster, platform)
        train = TrainConfig(
            max_tokens_per_micro_batch=case["max_tokens"],
            packing=case["packing"],
            optimizer={"lr": 0.0, "weight_decay": 0.0, "clip_grad": 0.0},
        )
        policy = build(ModelConfig(hf_config=MODEL, dtype="fp32"), cluster, platform, ddp={}, seed=SEED)
        actor = Actor(policy, topology, train, temperature=TEMPERATURE, total_updates=len(METHODS))
        share = WORLD.part(slice(0, 1) if topology.replica == 0 else slice(1, 4))
        scope = Scope(step=STEP, total_steps=STEPS, sum=topology.sum_over_replicas)
        taken = {}
        for name in METHODS:
            method, options = chosen(name)
            batch = credited_batch(method, options, share)
            batch, stats = scored(method, options, batch, actor.logprobs(batch, second_moments=True, head_gram=True))
            batch = replace(batch, scalars={"accuracy": accuracy(share, scope.sum)})
            batch, states, metrics = prepare(method, options, batch, stats, {}, scope)
            batch = weights(batch, options.loss.reduce, MAX_TOKENS, topology.dp_cpu_pg)
            update = actor.update(batch, lambda s, b, m=method, o=options: m.token_loss(s, b, o))
            taken[name] = {"loss": update.loss, "norm": update.grad_norm, "states": states, "metrics": metrics}
        results[layout] = taken
        topology.close()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(__file__, "work", 4, {"layouts": LAYOUTS}, Path(tmp_path_factory.mktemp("methods")), timeout_s=400)


@pytest.fixture(scope="module")
def model() -> Any:
    values = dict(MODEL)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(SEED)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")


def statistics(model: Any, batch: TokenBatch) -> TokenStats:
    columns: list[list[torch.Tensor]] = [[], [], [], []]
    residuals, hidden = [], []
    for n in range(batch.num_rows):
        tokens = batch.tokens_T[batch.cu_seqlens_N1[n] : batch.cu_seqlens_N1[n + 1]]
        output = model(tokens[None], output_hidden_states=True)
        log_p = (output.logits[0, :-1].float() / TEMPERATURE).log_softmax(-1)
        d = (log_p.detach().exp() - torch.nn.functional.one_hot(tokens[1:], log_p.shape[1])) / TEMPERATURE
        h = output.hidden_states[-1][0, :-1].detach()
        residuals += [torch.zeros(1, d.shape[1]), d]
        hidden += [torch.zeros(1, h.shape[1]), h]
        p = log_p.exp()
        own = log_p.gather(1, tokens[1:, None])[:, 0]
        values = (own, -(p * log_p).sum(-1), p.square().sum(-1), (p.square() * log_p).sum(-1))
        for column, value in zip(columns, values, strict=True):
            column += [torch.zeros(1), value]
    names = ("logprobs_T", "entropy_T", "sum_p2_T", "sum_p2_logp_T")
    stats = TokenStats(**{name: torch.cat(column) for name, column in zip(names, columns, strict=True)})
    return replace(stats, head_gram_T=head_gram(torch.cat(residuals), torch.cat(hidden), batch))


@pytest.mark.parametrize("name", METHODS)
def test_every_layout_takes_the_step_of_one_process(
    name: str, results: list[dict[str, dict[str, Any]]], model: Any
) -> None:
    method, options = chosen(name)
    batch = credited_batch(method, options, WORLD)
    with torch.no_grad():
        before = statistics(model, batch)
    batch, stats = scored(method, options, batch, before)
    scope = Scope(step=STEP, total_steps=STEPS, sum=lambda values: values)
    batch = replace(batch, scalars={"accuracy": accuracy(WORLD, scope.sum)})
    batch, states, metrics = prepare(method, options, batch, stats, {}, scope)
    weights_T = token_weights(batch, count(batch), options.loss.reduce, MAX_TOKENS)
    loss_T, _ = method.token_loss(statistics(model, batch), batch, options)
    model.zero_grad()
    loss = (weights_T * loss_T).sum()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    assert norm > 1e-4
    for rank in results:
        for layout in LAYOUTS:
            got = rank[layout][name]
            assert got["loss"] == pytest.approx(loss.item(), rel=2e-5, abs=2e-6), layout
            assert got["norm"] == pytest.approx(norm, rel=2e-4), layout
            assert got["metrics"] == pytest.approx(metrics, rel=1e-4, abs=1e-6), layout
            assert got["states"].keys() == states.keys()
            for part, state in states.items():
                assert got["states"][part] == pytest.approx(state, rel=1e-4), layout


STATEFUL = (
    "method.name=gcpo",
    "method.token_credit=[papo,cw]",
    "method.sampler=gaussian",
    "method.loss.kl_coef=0.05",
    "method.loss.kl_controller={name: adaptive, target: 0.001, horizon: 100}",
)
REFERENCE = ("data.train.demonstration_column=solution", "verify.options.pattern=(purple)")
RUNS: dict[str, tuple[str, ...]] = {
    "gcpo_gold": ("method.name=gcpo_gold", *REFERENCE),
    "grpo_wrong": ("method.name=grpo", *REFERENCE),
    "kl_cov": ("method.name=kl_cov", "train.mini_batches=2"),
    "conspo": ("method.name=conspo",),
    "rspo": ("method.name=rspo",),
    "opefo": ("method.name=opefo",),
    "dqo": ("method.name=dqo",),
    "lead": ("method.name=lead", "method.shortest=1", "method.longest=6"),
    "bet": ("method.name=bet", "method.max_tokens=6"),
    "vigor": ("method.name=vigor",),
    "ed_idpo": ("method.name=ed_idpo",),
    "stepcode": ("method.name=stepcode",),
    "recrit": (
        *("method.name=recrit", "method.max_tokens=6", "method.buffer=3"),
        *("model.hf_config.max_position_embeddings=128", "train.max_tokens_per_micro_batch=512"),
        "model.tokenizer=FOLDER/critic",
    ),
}
PLAIN = ("data.heldout=null", "evaluate.every=0", "checkpoint.every=2", "train.scheduler.lr_warmup_steps=0")


def runs(recipe: str, folder: str) -> dict[str, Any]:
    """On each of two replicas: runs of two steps, and one of four that is interrupted after two."""
    from tests.dist.whole_runs import train

    short = {}
    for name, overrides in RUNS.items():
        overrides = [override.replace("FOLDER", folder) for override in overrides]
        seen = train(recipe, *PLAIN, *overrides, f"run.output_dir={folder}/{name}", "run.steps=2")
        short[name] = [update["stats"] for update in seen.updates]
    straight = train(recipe, *PLAIN, *STATEFUL, f"run.output_dir={folder}/straight", "run.steps=4")
    train(recipe, *PLAIN, *STATEFUL, f"run.output_dir={folder}/resumed", "run.steps=2", *SCHEDULE)
    resumed = train(recipe, *PLAIN, *STATEFUL, f"run.output_dir={folder}/resumed", "run.steps=4")
    return {"short": short, "straight": straight.updates, "resumed": resumed.updates}


SCHEDULE = ("train.scheduler.lr_decay_steps=4",)
"""A run of two steps on the schedule of four."""


def _teach_unknown_words(folder: Path) -> None:
    """A tokenizer in which a critic's words are tokens too, all the same one."""
    shutil.copytree(folder / "tokenizer", folder / "critic")
    path = folder / "critic/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["[UNK]"] = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["unk_token"] = "[UNK]"
    path.write_text(json.dumps(tokenizer))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = Path(tmp_path_factory.mktemp("method_runs"))
    recipe = write_recipe(folder, rollout={"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6})
    _teach_unknown_words(folder)
    arguments = {"recipe": str(recipe), "folder": str(folder)}
    return folder, run_ranks(__file__, "runs", 2, arguments, folder / "ranks", timeout_s=400)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_takes_its_steps(name: str, whole: tuple[Path, list[dict[str, Any]]]) -> None:
    """With rewards that are never given, only the golden answers move the policy."""
    for rank in whole[1]:
        updates = rank["short"][name]
        assert len(updates) == (4 if name == "kl_cov" else 2)
        assert not any(update.skipped for update in updates)
        moved = [update.grad_norm > 1e-5 for update in updates]
        assert not any(moved) if name == "grpo_wrong" else any(moved)


def test_controllers_and_sampler_go_on_after_a_resume(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    """The KL weight, the entropy of reference and the estimates of the sampler are those of the run that never stopped."""
    folder, ranks = whole
    states = [
        read_extra(folder / name / "checkpoints/step_00000004")["method_state"] for name in ("straight", "resumed")
    ]
    assert states[0] == states[1]
    assert states[0]["controllers"]["kl"]["kl_coef"] != 0.05
    assert states[0]["controllers"]["papo"]["entropy"] > 0
    assert len(states[0]["sampler"]["rates"]) >= 4
    for rank in ranks:
        for went, resumed in zip(rank["straight"][2:], rank["resumed"], strict=True):
            assert went["stats"] == resumed["stats"]
            assert torch.equal(went["batch"].tokens_T, resumed["batch"].tokens_T)
            assert all(torch.equal(w, resumed["weights"][name]) for name, w in went["weights"].items())

"""Whole runs: killed and resumed ones equal one that was left alone, and a replica keeps its text to itself."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_gcpo.cluster import failure, launch
from tests.dist.harness import fork_ranks, run_ranks
from tests.dist.tiny import write_recipe

ROOT = Path(__file__).parents[2]
STEPS, EVERY, MINI_BATCHES = 6, 2, 2
TP2 = ("cluster.tensor_model_parallel_size=2",)
PLAIN = ("data.heldout=null", "evaluate.every=0")
DAPO_REFILL = 2


# ---- what the ranks do -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw of a run."""

    updates: list[dict[str, Any]]
    """weights: what the policy exported before the update; batch; stats."""
    experiences: list[Any]
    embeddings: list[list[torch.Tensor | None]]


def work(recipe: str, folder: str) -> dict[str, Any]:
    """On two ranks, one run after the other."""
    train(recipe, *TP2, f"run.output_dir={folder}/straight")
    replicas, leaks = train_tapped(recipe, f"run.output_dir={folder}/replicas", "run.steps=2", "evaluate.at_end=false")
    train(recipe, *PLAIN, f"run.output_dir={folder}/dapo", "method.name=dapo", f"method.refill={DAPO_REFILL}")
    source = "data.train.demonstration_column=solution"
    sft = train(recipe, *PLAIN, f"run.output_dir={folder}/sft", "run.stage=sft", source, "train.sft_rows_per_step=8")
    started = train(recipe, *PLAIN, f"run.output_dir={folder}/started", f"model.start_from={folder}/sft", "run.steps=3")
    never_right = ("verify.options.pattern=(purple)", f"run.output_dir={folder}/wrong")
    return {
        "replicas": vars(replicas),
        "leaks": leaks,
        "wrong": vars(train(recipe, *PLAIN, *never_right, "run.steps=2")),
        "sft": vars(sft),
        "started": started.updates[0]["weights"],
        "names": option_names_by_import(),
        "dry_run": dry_run(recipe, *TP2),
    }


def train(recipe: str, *overrides: str) -> Seen:
    from megatron_gcpo.cli import run_folder
    from megatron_gcpo.cluster.platform import install
    from megatron_gcpo.config import load

    config = load(recipe, overrides)
    platform = install("cpu")
    with watched() as seen:
        from megatron_gcpo.loop import work as run

        assert run(config, run_folder(config), platform) == 0
    return seen


def train_until_killed(recipe: str, folder: str) -> None:
    from megatron_gcpo.policy import manifest

    def die(*_: Any) -> None:
        if launch.worker_env().rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(manifest, "write", die):
        train(recipe, *TP2, f"run.output_dir={folder}")


@contextmanager
def watched() -> Iterator[Seen]:
    from megatron_gcpo import collect, step
    from megatron_gcpo.policy.actor import Actor

    seen = Seen(updates=[], experiences=[], embeddings=[])
    update, collected, embed_groups = Actor.update, step.collect, collect.embed_groups

    def record_update(actor: Actor, batch: Any, token_loss: Any) -> Any:
        weights = {name: tensor.clone() for name, tensor in actor.export()}
        stats = update(actor, batch, token_loss)
        seen.updates.append({"weights": weights, "batch": batch, "stats": stats})
        return stats

    def record_experience(*args: Any) -> Any:
        seen.experiences.append(collected(*args))
        return seen.experiences[-1]

    def record_embeddings(*args: Any, **kwargs: Any) -> Any:
        seen.embeddings.append(embed_groups(*args, **kwargs))
        return seen.embeddings[-1]

    with (
        mock.patch.object(Actor, "update", record_update),
        mock.patch.object(step, "collect", record_experience),
        mock.patch.object(collect, "embed_groups", record_embeddings),
    ):
        yield seen


def train_tapped(recipe: str, *overrides: str) -> tuple[Seen, dict[str, Any]]:
    """A run of two replicas of one rank each, and what of its text, tokens and embeddings the wires carried."""
    from tests.dist import wiretap

    with wiretap.tapped() as payloads:
        seen = train(recipe, *overrides)
    secrets = list(secrets_of(seen))
    between = [p for p in payloads if len(p.ranks) > 1]
    inside = [p for p in payloads if len(p.ranks) == 1]
    batches = [p.obj for p in inside if any(type(part).__name__ == "TokenBatch" for part in flat(p.obj))]
    return seen, {
        "secrets": len(secrets),
        "between": sum(len(p.data) for p in between),
        "collectives": sorted({p.collective for p in between}),
        "between_replicas": [(what, p.collective) for what, secret in secrets for p in between if secret in p.data],
        "batches": len(batches),
        "strings_in_batches": [s for obj in batches for s in wiretap.strings(obj)],
        "inside": [
            (what, p.collective) for what, secret in secrets for p in inside if what != "tokens" and secret in p.data
        ],
        "control": control(recipe, seen),
    }


def flat(obj: Any) -> list[Any]:
    return [part for item in obj for part in flat(item)] if isinstance(obj, list | tuple) else [obj]


def secrets_of(seen: Seen) -> Iterator[tuple[str, bytes]]:
    """(what, bytes) of everything that belongs to this replica alone."""
    for experience in seen.experiences:
        for group in experience.groups:
            yield "prompt", group.prompt.text.encode()
            for rollout in group.rollouts:
                # Shorter ones occur by chance: "is" in a name, two small numbers in a row.
                if len(rollout.text) > 8 and " " in rollout.text:
                    yield "text", rollout.text.encode()
                if len(rollout.token_ids) > 2:
                    yield "tokens", rollout.token_ids.tobytes()
    for embeddings_GD in (e for embeddings in seen.embeddings for e in embeddings if e is not None):
        for row_D in embeddings_GD[embeddings_GD.any(dim=-1)]:
            yield "embedding", row_D[:8].numpy().tobytes()
            yield "embedding in float64", row_D[:8].double().numpy().tobytes()


def control(recipe: str, seen: Seen) -> bool:
    """The tap notices a text and an embedding that are sent on purpose."""
    from megatron_gcpo.cluster import topology
    from megatron_gcpo.cluster.platform import install
    from megatron_gcpo.config import load
    from tests.dist import wiretap

    ranks = topology.init(load(recipe).cluster, install("cpu"))
    secrets = list(secrets_of(seen))
    text = next(secret for what, secret in secrets if what == "text")
    row = next(secret for what, secret in secrets if what == "embedding")
    with wiretap.tapped() as payloads:
        ranks.broadcast_object_to_all(text.decode())
        torch.distributed.all_reduce(torch.frombuffer(bytearray(row), dtype=torch.float32), group=ranks.dp_pg)
    ranks.close()
    return any(text in p.data for p in payloads) == (ranks.rank == 0) and any(row in p.data for p in payloads)


def dry_run(recipe: str, *overrides: str) -> str:
    from rich.console import Console

    from megatron_gcpo.config import load
    from megatron_gcpo.preflight import describe

    console = Console(file=io.StringIO(), width=200)
    describe(load(recipe, overrides), Path("nowhere"), console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def option_names_by_import() -> list[bool]:
    """Whether the option names that the configuration reads from Megatron's source are those of its classes."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from megatron_gcpo.config import megatron_names as names
    from megatron_gcpo.policy.options import option_names

    kinds = (OptimizerConfig, OptimizerParamScheduler, DistributedDataParallelConfig)
    sources = (names.OPTIMIZER, names.SCHEDULER, names.DDP)
    return [option_names(kind) == names.option_names(*source) for kind, source in zip(kinds, sources, strict=True)]


# ---- the runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    return write_recipe(
        folder,
        run={"steps": STEPS, "output_dir": str(folder / "run")},
        checkpoint={"every": EVERY, "keep_last": 2},
        # So short that texts come back after a checkpoint: the encoder's memory must not make a difference.
        rollout={"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 3},
        evaluate={"samples": 2, "ks": [1, 2], "every": EVERY},
        train={
            "mini_batches": MINI_BATCHES,
            "max_tokens_per_micro_batch": 64,
            "optimizer": {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 1.0},
            "scheduler": {"lr_decay_style": "linear", "lr_warmup_steps": 2},
        },
    )


@pytest.fixture(scope="module")
def ranks(recipe: Path, folder: Path) -> list[dict[str, Any]]:
    arguments = {"recipe": str(recipe), "folder": str(folder)}
    return run_ranks(__file__, "work", 2, arguments, folder / "ranks", timeout_s=400)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    code: int
    errors: str
    checkpoints: list[str]


def command(recipe: Path, folder: Path, kill_at: str | None = None) -> Attempt:
    """The command line as a user starts it, on the folder of one run."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "dist" / "kill"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_gcpo.cli", "train", str(recipe), *TP2, f"run.output_dir={folder}"],
        env=env if kill_at is None else {**env, "KILL_AT": kill_at},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Attempt(code=done.returncode, errors=done.stderr, checkpoints=checkpoints_in(folder))


def forked(recipe: Path, run: Path) -> Attempt:
    """The same run by ranks without a parent; rank 0 is killed when all but the manifest of its checkpoint is written."""
    logs = run.parent / "forked"
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", launch.PREFIX + "LOG_DIR": str(logs / "logs")}
    arguments = {"recipe": str(recipe), "folder": str(run)}
    processes = fork_ranks(__file__, "train_until_killed", 2, arguments, logs, store.port, env, timeout_s=200)
    for process in processes:
        process.join()
    codes = {rank: process.exitcode for rank, process in enumerate(processes)}
    rank, why = failure.first_failure(logs / "logs", codes)
    return Attempt(code=codes[1], errors=f"error: rank {rank}: {why}", checkpoints=checkpoints_in(run))


def checkpoints_in(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def attempts(recipe: Path, folder: Path) -> list[Attempt]:
    """One run in three lives: rank 1 is killed in an update of step 4, then rank 0 in the checkpoint of step 4."""
    run = folder / "killed"
    update = (EVERY + 1) * MINI_BATCHES + 1
    return [
        command(recipe, run, f"1 megatron_gcpo.policy.actor Actor.update {update}"),
        forked(recipe, run),
        command(recipe, run),
    ]


# ---- kill and resume ---------------------------------------------------------------------------------------------


def test_a_killed_rank_ends_the_run_with_one_line(attempts: list[Attempt]) -> None:
    for rank, attempt in enumerate(reversed(attempts[:2])):
        errors = [line for line in attempt.errors.splitlines() if "error" in line.lower() or "Traceback" in line]
        assert attempt.code == 1
        assert len(errors) == 1, attempt.errors
        assert errors[0].startswith(f"error: rank {rank}: was killed by SIGKILL")


def test_a_torn_checkpoint_is_never_used(attempts: list[Attempt]) -> None:
    first, second, third = (attempt.checkpoints for attempt in attempts)
    assert first == ["step_00000002"]
    assert second == ["step_00000002", "step_00000004.partial"]
    assert third == ["step_00000004", "step_00000006"]
    assert attempts[-1].code == 0


def test_a_resumed_run_has_the_metrics_of_one_left_alone(
    attempts: list[Attempt], ranks: list[dict[str, Any]], folder: Path
) -> None:
    """To the last bit, but for clocks and memory."""
    straight, killed = (
        [comparable(json.loads(line)) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("straight", "killed")
    )
    assert [row["step"] for row in straight] == [*range(1, STEPS + 1), STEPS]
    assert killed == straight


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "time" and not name.startswith(("time/", "perf/"))}


def test_a_resumed_run_samples_and_pays_the_same_rollouts(
    attempts: list[Attempt], ranks: list[dict[str, Any]], folder: Path
) -> None:
    files = sorted((folder / "straight" / "rollouts").iterdir())
    assert [f.name for f in files] == [f"step_{step:06d}_replica_000.parquet" for step in range(1, STEPS + 1)]
    assert [f.name for f in sorted((folder / "killed" / "rollouts").iterdir())] == [f.name for f in files]
    rewards, seen = [], {}
    for file in files:
        table = pq.read_table(file)
        assert table.equals(pq.read_table(folder / "killed" / "rollouts" / file.name)), file.name
        rewards += table["reward"].to_pylist()
        for hashed in set(table["embedding_hash"].to_pylist()) - {None}:
            seen.setdefault(hashed, []).append(file.name)
    assert 0 < sum(rewards) < len(rewards)  # there was something to learn
    assert any(len(steps) > 1 for steps in seen.values())  # and to remember


def test_a_resumed_run_ends_with_the_same_weights_and_optimizer_state(
    attempts: list[Attempt], ranks: list[dict[str, Any]], folder: Path
) -> None:
    """Schedule, update counts and random states too."""
    name = f"checkpoints/step_{STEPS:08d}"
    straight, killed = (stored_in(folder / run / name) for run in ("straight", "killed"))
    assert straight.keys() == killed.keys()
    for kind in ("word_embeddings", "exp_avg_sq", "common_state", "random"):
        assert any(kind in key for key in straight), kind
    assert [key for key in straight if not same(straight[key], killed[key])] == []
    before = stored_in(folder / "killed" / f"checkpoints/step_{STEPS - EVERY:08d}")
    weight = "embedding.word_embeddings.weight"
    assert not same(before[weight], killed[weight])


def stored_in(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint, tensors whole, without any process group."""
    reader = dcp.FileSystemReader(str(checkpoint))
    state: dict[str, Any] = {}
    for key, kept in reader.read_metadata().state_dict_metadata.items():
        if isinstance(kept, TensorStorageMetadata):
            state[key] = torch.empty(kept.size, dtype=kept.properties.dtype)
        elif key.startswith(("common_state", "random")):
            state[key] = None
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, through all containers."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_both_runs_sum_up_alike(attempts: list[Attempt], ranks: list[dict[str, Any]], folder: Path) -> None:
    straight, killed = (json.loads((folder / run / "summary.json").read_text()) for run in ("straight", "killed"))
    for name in ("step", "before", "after", "skipped_updates", "data"):
        assert straight[name] == killed[name], name


# ---- replicas ----------------------------------------------------------------------------------------------------


def test_no_text_tokens_or_embeddings_leave_their_replica(ranks: list[dict[str, Any]]) -> None:
    """Of two replicas' run, every byte of every collective between them is searched for what is theirs alone."""
    for rank in ranks:
        leaks = rank["leaks"]
        assert leaks["secrets"] > 40
        assert leaks["between"] > 100_000  # gradients and weights did travel
        assert leaks["control"]
        assert leaks["between_replicas"] == []


def test_inside_a_replica_only_tensors_travel(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["leaks"]["batches"] >= 2 + 1  # two steps, and the push before them
        assert rank["leaks"]["strings_in_batches"] == []
        assert rank["leaks"]["inside"] == []


def test_replicas_hold_the_same_policy_and_different_groups(ranks: list[dict[str, Any]]) -> None:
    one, two = (rank["replicas"] for rank in ranks)
    assert len(one["updates"]) == len(two["updates"]) == 2 * MINI_BATCHES
    for a, b in zip(one["updates"], two["updates"], strict=True):
        assert all(torch.equal(a["weights"][name], b["weights"][name]) for name in a["weights"])
        assert a["stats"] == b["stats"]
    ids = [[g.prompt.id for e in rank["experiences"] for g in e.groups] for rank in (one, two)]
    assert len(set(ids[0] + ids[1])) == 2 * 4


def test_option_names_are_those_of_megatron(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["names"] == [True, True, True]


# ---- the single file as oracle -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gcpo_single_file", ROOT / "examples" / "gcpo_single_file.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_credits_are_those_of_the_single_file(ranks: list[dict[str, Any]], example: ModuleType) -> None:
    """From verdicts and embeddings to the advantages in the batch, group by group."""
    paid = 0
    for rank in ranks:
        for experience, embeddings in zip(rank["replicas"]["experiences"], rank["replicas"]["embeddings"], strict=True):
            for verdict, credit, embeddings_GD in zip(experience.verdicts, experience.credits, embeddings, strict=True):
                rewards_G = torch.from_numpy(verdict.rewards_G)
                if embeddings_GD is None:  # at most one correct rollout, whose direction makes no difference
                    embeddings_GD = torch.eye(1, 8).repeat(len(rewards_G), 1)
                expected_G = example.gcpo_advantages(embeddings_GD, rewards_G)
                torch.testing.assert_close(credit.advantages_G, expected_G, rtol=1e-7, atol=1e-7)
                paid += int((rewards_G > 0).sum() >= 2)
    assert paid >= 2


def test_updates_are_those_of_the_single_file(ranks: list[dict[str, Any]], recipe: Path, example: ModuleType) -> None:
    """Loss and gradient norm of both replicas' rows together, by plain autograd on the Hugging Face model.

    Both updates of a step: the first on-policy, the second against the log-probs from before the first.
    """
    updates = list(zip(*(rank["replicas"]["updates"] for rank in ranks), strict=True))
    moved = 0
    for number, parts in enumerate(updates):
        rows = [row for part in parts for row in rows_of(part["batch"])]
        if not rows:
            continue
        model = hugging_face_model(recipe, parts[0]["weights"])
        width = max(len(row["tokens"]) for row in rows)
        tokens_RS, mask_RS, old_RS = (
            torch.stack([padded(row[n], width) for row in rows]) for n in ("tokens", "mask", "old")
        )
        attention_RS = torch.stack([padded(torch.ones_like(row["tokens"]), width) for row in rows])
        new_RS = example.token_logprobs(model, tokens_RS, attention_RS)
        if number % MINI_BATCHES == 0:
            torch.testing.assert_close(new_RS.detach() * mask_RS, old_RS * mask_RS, rtol=0, atol=1e-4)
        advantages_R = torch.stack([row["advantage"] for row in rows])
        loss = example.clipped_loss(new_RS, old_RS, advantages_R, mask_RS)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        stats = parts[0]["stats"]
        assert stats.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
        assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        moved += not torch.allclose(new_RS * mask_RS, old_RS * mask_RS, atol=1e-3)
    assert moved >= 1


def rows_of(batch: Any) -> Iterator[dict[str, torch.Tensor]]:
    for start, end in zip(batch.cu_seqlens_N1[:-1], batch.cu_seqlens_N1[1:], strict=True):
        row = slice(int(start), int(end))
        mask = batch.mask_T[row]
        yield {
            "tokens": batch.tokens_T[row],
            "mask": mask,
            "old": batch.old_logprobs_T[row],
            "advantage": batch.advantages_T[row][mask.bool()][0],
        }


def padded(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, width - len(values)))


def hugging_face_model(recipe: Path, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron_gcpo.config import load

    shape = dict(load(recipe).model.hf_config or {})
    config = AutoConfig.for_model(
        shape.pop("model_type"), **shape, vocab_size=len(weights["model.embed_tokens.weight"])
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model.eval()


# ---- warm start ---------------------------------------------------------------------------------------------------


def test_demonstrations_become_likelier_and_the_next_run_starts_there(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    losses = [update["stats"].loss for update in ranks[0]["sft"]["updates"]]
    assert len(losses) == STEPS  # one update a step, whatever train.mini_batches says
    assert losses[-1] < losses[1]
    trained = stored_in(folder / "sft" / f"checkpoints/step_{STEPS:08d}")["embedding.word_embeddings.weight"]
    first = ranks[0]["sft"]["updates"][0]["weights"]["model.embed_tokens.weight"]
    for rank in ranks:
        start = rank["started"]["model.embed_tokens.weight"]
        assert torch.equal(start, trained)
        assert not torch.equal(start, first)


def test_a_dry_run_prints_the_run_without_starting_it(ranks: list[dict[str, Any]]) -> None:
    text = ranks[0]["dry_run"]
    assert yaml.safe_load(text.split("rank grid")[0])["train"]["optimizer"]["lr"] == 0.01
    table = [line for line in text.splitlines() if line.startswith("│")]
    assert len(table) == 2
    assert "(leader)" in table[0]
    assert "2 ranks = 1 replicas" in text
    assert "4 prompts x 8 rollouts = 32 sequences, 4 prompts = 32 sequences on each replica" in text
    assert f"updates in a step: {MINI_BATCHES}, each on 2 groups" in text


# ---- groups without signal ---------------------------------------------------------------------------------------


def test_dapo_fills_the_step_with_groups_that_carry_signal(ranks: list[dict[str, Any]], folder: Path) -> None:
    """From the rollouts on disk: rounds go on until enough groups differ in their rewards, and those alone are trained."""
    wanted, refilled = 2, 0
    for file in sorted((folder / "dapo" / "rollouts").iterdir()):
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in pq.read_table(file).to_pylist():
            groups.setdefault(row["prompt_id"], []).append(row)
        signal = [len({row["reward"] for row in rows}) > 1 for rows in groups.values()]
        trained = [rows[0]["trained"] for rows in groups.values()]
        rounds = len(groups) // wanted
        assert len(groups) == wanted * rounds
        assert rounds == 1 + DAPO_REFILL or sum(signal) >= wanted
        assert sum(signal[: wanted * (rounds - 1)]) < wanted
        assert trained == [s and sum(signal[:i]) < wanted for i, s in enumerate(signal)]
        refilled += rounds > 1
    assert refilled


def test_a_step_in_which_nothing_was_learned_leaves_the_weights_alone(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    """No rollout is right, so every group is filtered out: neither momentum nor weight decay may move a weight."""
    for rank in ranks:
        updates = rank["wrong"]["updates"]
        assert len(updates) == 2 * MINI_BATCHES
        for update in updates:
            assert (update["stats"].loss, update["stats"].grad_norm, update["stats"].skipped) == (0.0, 0.0, False)
            assert all(torch.equal(w, updates[0]["weights"][name]) for name, w in update["weights"].items())
        for experience in rank["wrong"]["experiences"]:
            assert not any(experience.trained)
    rows = [json.loads(line) for line in (folder / "wrong" / "metrics.jsonl").read_text().splitlines()]
    assert [row["credit/trained_groups_share"] for row in rows] == [0.0, 0.0]
    assert [row["train/skipped_updates"] for row in rows] == [0.0, 0.0]

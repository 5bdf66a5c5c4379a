"""Whole runs on two ranks, one after the other in the same processes, and what was seen of them."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_gcpo.cluster import launch

STEPS, EVERY, MINI_BATCHES = 6, 2, 2
TP2 = ("cluster.tensor_model_parallel_size=2",)
PLAIN = ("data.heldout=null", "evaluate.every=0")
DAPO_REFILL = 2


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

    def record_update(actor: Actor, batch: Any, token_loss: Any, **options: Any) -> Any:
        weights = {name: tensor.clone() for name, tensor in actor.export()}
        stats = update(actor, batch, token_loss, **options)
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

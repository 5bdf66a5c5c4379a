"""Save, resume and reshard: what continues, bit for bit or to 1e-5, and what is refused."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_gcpo.config.records import TrainConfig
from megatron_gcpo.policy import manifest
from tests.dist.harness import RanksFailed, run_ranks
from tests.dist.test_actor import cluster_of, export, global_batch, model_of, share, token_loss

TRAIN = {
    "max_tokens_per_micro_batch": 64,
    "optimizer": {"lr": 0.01, "weight_decay": 0.1, "adam_eps": 1e-6},
    "scheduler": {"lr_decay_style": "linear", "lr_warmup_steps": 1},
}
TP2_PP2 = {"tp": 2, "pp": 2, "sp": True}
DP4 = {"dp": 4}
CASES: dict[str, dict[str, Any]] = {
    "tied": {"model": "tied", "home": TP2_PP2, "others": [DP4, {"pp": 2, "vpp": 2, "dp": 2}, {"tp": 2, "dp": 2}]},
    "untied-from-dp4": {"model": "untied", "home": DP4, "others": [TP2_PP2]},
    "bf16": {"model": "tied", "dtype": "bf16", "home": TP2_PP2, "others": [{"pp": 2, "dp": 2}]},
    "moe": {
        "model": "moe",
        "home": {"ep": 2, "pp": 2, "dp": 2},
        "others": [{"ep": 4, "dp": 4}, {"tp": 2, "dp": 2, "etp": 1, "sp": True}],
    },
    "plain-optimizer": {
        "model": "untied",
        "home": {"tp": 2, "dp": 2},
        "others": [{"pp": 2, "dp": 2}],
        "ddp": {"use_distributed_optimizer": False},
    },
}
MOMENTS = {"while its rank 1 writes": 1, "before the manifest": 0, "before the final name": 0}
"""When a save is killed, and which rank is."""


def start(case: dict[str, Any], seed: int, start_from: str | None = None) -> Any:
    """The actor of this rank; case: see test_actor.CASES."""
    from megatron_gcpo.cluster import platform as platforms
    from megatron_gcpo.cluster import topology as topologies
    from megatron_gcpo.policy.actor import Actor
    from megatron_gcpo.policy.build import build

    platform, cluster, ddp = platforms.install("cpu"), cluster_of(case), case.get("ddp", {})
    topology = topologies.init(cluster, platform)
    try:
        model = model_of(case).model_copy(update={"start_from": start_from})
        policy = build(model, cluster, platform, ddp=ddp, seed=seed)
    except ValueError:
        topology.close()
        raise
    return Actor(policy, topology, TrainConfig(**TRAIN, ddp=ddp), temperature=1.0, total_updates=10)


def train(actor: Any, steps: int) -> list[Any]:
    batch = share(global_batch(), actor.topology.replica, actor.topology.dp_size)
    return [actor.update(batch, token_loss) for _ in range(steps)]


def draw() -> list[float]:
    """The next number of every stream that a checkpoint carries."""
    import random

    import numpy as np
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        forked = torch.rand(1).item()
    return [forked, torch.rand(1).item(), random.random(), float(np.random.random())]


def resume_everywhere(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """On each rank and for each case: two updates, a checkpoint, two more; then those two again from the checkpoint."""
    from megatron_gcpo.policy import checkpoint, manifest

    results = {}
    for name, case in cases.items():
        run = Path(folder) / name
        actor = start(case | case["home"], seed=3)
        train(actor, 2)
        checkpoint.save(run, actor, {"cursor": [1, 2], "rank": actor.topology.rank}, step=2, keep_last=2)
        straight = {"draws": draw(), "updates": train(actor, 2), "weights": export(actor)}
        actor.topology.close()

        actor = start(case | case["home"], seed=4)
        extra = checkpoint.load(manifest.newest(run), actor)
        resumed = {"draws": draw(), "updates": train(actor, 2), "weights": export(actor)}
        same = all(torch.equal(straight["weights"][n], w) for n, w in resumed.pop("weights").items())
        straight.pop("weights")
        counts = (actor.num_updates, actor.num_skipped)
        actor.topology.close()

        others = []
        for layout in case["others"]:
            actor = start(case | layout, seed=5)
            checkpoint.load(manifest.newest(run), actor)
            others.append(train(actor, 2))
            actor.topology.close()
        results[name] = {
            "straight": straight,
            "resumed": resumed,
            "same_weights": same,
            "extra": extra,
            "counts": counts,
            "others": others,
        }
    return results


def die_while_saving(run: str, moment: str) -> None:
    """On each of two ranks: a checkpoint of step 1, then one of step 2 during which one rank is killed."""
    from megatron.core import dist_checkpointing

    from megatron_gcpo.policy import checkpoint, manifest

    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    actor = start({"model": "tied", "pp": 2}, seed=3)
    checkpoint.save(run, actor, {}, step=1, keep_last=1)
    if actor.topology.rank == MOMENTS[moment]:
        match moment:
            case "while its rank 1 writes":
                dist_checkpointing.save = die
            case "before the manifest":
                manifest.write = die
            case "before the final name":
                manifest.rename = die
    checkpoint.save(run, actor, {}, step=2, keep_last=1)


def misuse(run: str) -> dict[str, Any]:
    """On each rank: what an earlier run left, a full disk, a write that fails on one rank, pruning, what may follow."""
    from megatron_gcpo.policy import checkpoint, manifest

    folder, seen = Path(run) / "checkpoints", {}

    actor = start({"model": "tied", **TP2_PP2}, seed=3)

    def names() -> list[str]:
        found = sorted(p.name for p in folder.iterdir())
        actor.topology.broadcast_object_to_all()  # nobody writes again before all have looked
        return found

    trained = export(actor)
    actor.topology.broadcast_object_to_all()  # nobody writes before all have come
    checkpoint.save(run, actor, {}, step=1, keep_last=2)
    seen["after_torn"] = names()

    free_bytes, manifest.free_bytes = manifest.free_bytes, lambda path: 1000
    seen["full"] = failure(lambda: checkpoint.save(run, actor, {}, step=2, keep_last=2))
    manifest.free_bytes = free_bytes
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if actor.topology.rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    seen["failed"] = failure(lambda: checkpoint.save(run, actor, {}, step=2, keep_last=2))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    seen["after_failures"] = names()
    for step in (3, 4, 5):
        checkpoint.save(run, actor, {"step": step}, step=step, keep_last=2)
    seen["pruned"] = names()
    actor.topology.close()

    newest = manifest.newest(run)
    for name, case in {"llama": {"model": "llama", **DP4}, "bf16": {"model": "tied", "dtype": "bf16", **DP4}}.items():
        actor = start(case, seed=9)
        seen[f"resume {name}"] = failure(lambda actor=actor: checkpoint.load(newest, actor))
        actor.topology.close()
    for dtype in ("fp32", "bf16"):
        actor = start({"model": "tied", "dtype": dtype, "pp": 2, "dp": 2}, seed=9, start_from=run)
        weights = export(actor)
        seen[f"start {dtype}"] = all(torch.equal(trained[n].to(w.dtype), w) for n, w in weights.items())
        # The first update's rate is 0: it writes the optimizer's masters into the weights as they are.
        seen[f"rate {dtype}"] = train(actor, 1)[0].learning_rate
        seen[f"masters {dtype}"] = all(torch.equal(weights[n], w) for n, w in export(actor).items())
        seen[f"counts {dtype}"] = (actor.num_updates, actor.num_skipped)
        actor.topology.close()
    seen["start nowhere"] = failure(lambda: start({"model": "tied", **DP4}, seed=9, start_from=run + "_nowhere"))
    seen["start llama"] = failure(lambda: start({"model": "llama", **DP4}, seed=9, start_from=run))
    return seen


def failure(action: Callable[[], Any]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    kwargs = {"folder": str(folder / "runs"), "cases": CASES}
    return run_ranks(__file__, "resume_everywhere", 4, kwargs, folder / "work", timeout_s=500)


@pytest.mark.parametrize("name", CASES)
def test_resume_on_the_same_layout_is_bit_for_bit(name: str, ranks: list[dict[str, Any]]) -> None:
    """k steps, resume and n - k steps are n steps: weights, metrics, learning rates and random numbers are equal."""
    for rank in ranks:
        got = rank[name]
        assert got["resumed"] == got["straight"]
        assert got["same_weights"]
        assert got["counts"] == (4, 0)
        assert got["extra"] == {"cursor": [1, 2], "rank": 0}


@pytest.mark.parametrize("name", CASES)
def test_resume_on_another_layout_continues_with_the_same_loss(name: str, ranks: list[dict[str, Any]]) -> None:
    """In bf16 the layouts' own sums round apart: there a resume is only near."""
    tolerance = 2e-2 if CASES[name].get("dtype") == "bf16" else 1e-5
    for rank in ranks:
        for updates in rank[name]["others"]:
            for update, straight in zip(updates, rank[name]["straight"]["updates"], strict=True):
                assert update.loss == pytest.approx(straight.loss, rel=tolerance)
                assert update.grad_norm == pytest.approx(straight.grad_norm, rel=10 * tolerance)
                assert update.learning_rate == straight.learning_rate


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_save_that_is_killed_leaves_the_one_before(moment: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(RanksFailed, match=rf"exit codes: .*{MOMENTS[moment]}: -9"):
        run_ranks(__file__, "die_while_saving", 2, {"run": str(run), "moment": moment}, tmp_path / "work")
    torn = run / "checkpoints" / "step_00000002.partial"
    assert torn.is_dir()
    assert manifest.newest(run) == run / "checkpoints" / "step_00000001"
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        manifest.read(torn)


def test_what_goes_wrong_is_said_and_harms_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step_00000009.partial").mkdir(parents=True)
    for seen in run_ranks(__file__, "misuse", 4, {"run": str(run)}, tmp_path / "work"):
        assert seen["after_torn"] == ["step_00000001"]
        assert "free some" in seen["full"]
        assert "run.output_dir" in seen["full"]
        assert "checkpoint of step 2 was not written" in seen["failed"]
        assert seen["after_failures"] == ["step_00000001"]
        assert seen["pruned"] == ["step_00000004", "step_00000005"]
        assert "model_type is qwen3 there and llama here" in seen["resume llama"]
        assert "model.dtype=fp32" in seen["resume bf16"]

        for dtype in ("fp32", "bf16"):
            assert seen[f"start {dtype}"]
            assert seen[f"counts {dtype}"] == (1, 0)
            assert seen[f"rate {dtype}"] == 0
            assert seen[f"masters {dtype}"]
        assert "no complete checkpoint" in seen["start nowhere"]
        assert "train it first" in seen["start nowhere"]
        assert "model_type is qwen3 there and llama here" in seen["start llama"]

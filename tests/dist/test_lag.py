"""Whole runs that draw ahead: what is trained on when, what a resumed run does, and that nothing is lost or met twice."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from megatron_gcpo.config.records import CORRECTION_BOUNDS
from megatron_gcpo.data.sampler import PromptSampler
from megatron_gcpo.types import TokenStats
from tests.dist.harness import RanksFailed, run_ranks
from tests.dist.tiny import write_recipe
from tests.dist.whole_runs import PLAIN, TP2, train

STEPS, PROMPTS, GROUP, MAX_LAG = 4, 4, 8, 2


def work(recipe: str, folder: str) -> dict[str, Any]:
    """On two ranks, one run after the other; what the updates of each saw."""
    from megatron_gcpo import leader as runs
    from megatron_gcpo.rollout.background import Background

    def far_ahead(*arguments: Any, max_lag: int, num_steps: int) -> Background:
        # a run that ends with groups drawn, and others under way, that it will never train on
        return Background(*arguments, max_lag=max_lag, num_steps=num_steps + 50)

    # with a pass of the old policy, whose corrections are constants of the batch; the row-local ones need none
    lag = (f"rollout.max_policy_lag={MAX_LAG}", "train.old_logprobs=always")
    seen = {"process": train(recipe, *TP2, *lag, f"run.output_dir={folder}/process", f"run.steps={STEPS}")}
    with mock.patch.object(runs, "make_engine", embedded):
        settings = ("rollout.max_policy_lag=1", "train.scheduler.lr_warmup_steps=1")
        resumed = (recipe, *PLAIN, *TP2, *settings, f"run.output_dir={folder}/resumed")
        with mock.patch.object(runs, "Background", far_ahead):
            train(*resumed, "run.steps=2", "correction.kind=geometric")
        seen["resumed"] = train(*resumed, f"run.steps={STEPS}", "correction.kind=ais")
        replicas = (f"run.output_dir={folder}/replicas", f"run.steps={STEPS}", "correction.kind=sequence_tis")
        seen["replicas"] = train(recipe, *PLAIN, *lag, *replicas, "method.name=dapo", "method.refill=1")
    batches = {name: [update["batch"] for update in run.updates] for name, run in seen.items()}
    return {**batches, "losses": losses(recipe, batches["process"][1])}


def losses(recipe: str, batch: Any) -> dict[str, torch.Tensor]:
    """The run's token loss of a batch with and without its correction, and their gradients."""
    from megatron_gcpo.config import load
    from megatron_gcpo.methods import resolve
    from megatron_gcpo.run import Run

    method, options = resolve({"name": "grpo"})
    run: Any = SimpleNamespace(config=load(recipe), method=method, options=options)
    found = {"weights": batch.correction_T}
    for name, part in {"plain": replace(batch, correction_T=None), "corrected": batch}.items():
        logprobs_T = (batch.old_logprobs_T + 0.01).requires_grad_()
        stats = TokenStats(logprobs_T=logprobs_T, entropy_T=torch.zeros_like(logprobs_T))
        loss_T = Run.token_loss(run, stats, part)[0]
        loss_T.sum().backward()
        found |= {f"{name} loss": loss_T.detach(), f"{name} gradient": logprobs_T.grad}
    found["method"] = method.token_loss(stats, replace(batch, correction_T=None), options)[0].detach()
    return found


def embedded(config: Any, hf_config: Any, platform: Any, **_: Any) -> Any:
    """The engine in the thread's own process, which starts at once."""
    from megatron_gcpo.policy.options import DTYPES
    from megatron_gcpo.rollout.transformers_engine import TransformersEngine

    dtype = DTYPES[config.rollout.dtype or config.model.dtype]
    return TransformersEngine(
        hf_config, device=platform.device, dtype=dtype, max_batch_rows=config.rollout.max_batch_rows
    )


def work_until_it_fails(recipe: str, folder: str) -> None:
    """On two ranks; the third step of the leader's thread cannot be drawn."""
    from megatron_gcpo import leader as runs

    def failing(*arguments: Any, **options: Any) -> Any:
        engine = embedded(*arguments, **options)
        generate, calls = engine.generate, []

        def fail_at_last(*requests: Any) -> Any:
            calls.extend([1] * (threading.current_thread().name == "rollouts"))
            if len(calls) == 3:
                raise ValueError("all servers are gone; start one")
            return generate(*requests)

        engine.generate = fail_at_last
        return engine

    with mock.patch.object(runs, "make_engine", failing):
        train(recipe, *PLAIN, *TP2, "rollout.max_policy_lag=1", f"run.output_dir={folder}", f"run.steps={STEPS}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lag")


@pytest.fixture(scope="module")
def batches(folder: Path) -> list[dict[str, Any]]:
    recipe = write_recipe(
        folder,
        rollout={"prompts_per_step": PROMPTS, "group_size": GROUP, "max_new_tokens": 6},
        checkpoint={"every": 2},
        evaluate={"samples": 2, "ks": [1, 2], "every": 2},
    )
    arguments = {"recipe": str(recipe), "folder": str(folder)}
    return run_ranks(__file__, "work", 2, arguments, folder / "ranks", timeout_s=300)


def rollouts(folder: Path, run: str) -> dict[int, list[dict[str, Any]]]:
    """Step (1-based) -> the rollouts of all replicas."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for file in sorted((folder / run / "rollouts").iterdir()):
        for row in pq.read_table(file).to_pylist():
            steps.setdefault(row["step"], []).append(row)
    return steps


def metrics(folder: Path, run: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "reward/mean" in row]


@pytest.mark.parametrize("run", ["process", "resumed", "replicas"])
def test_the_entropies_on_disk_are_those_of_the_policy_before_the_update(
    batches: list[dict[str, Any]], folder: Path, run: str
) -> None:
    """From the old policy's pass, or (the first two steps of "resumed") the update's: they average to what it reported."""
    reported = {row["step"]: row["train/entropy"] for row in metrics(folder, run)}
    compared = 0
    for step, rows in rollouts(folder, run).items():
        assert all((row["entropies"] is None) != row["trained"] for row in rows)
        trained = [row["entropies"] for row in rows if row["trained"]]
        if trained:
            assert np.concatenate(trained).mean() == pytest.approx(reported[step], rel=1e-5)
            compared += 1
    assert compared


@pytest.mark.parametrize("run", ["process", "resumed", "replicas"])
def test_every_step_trains_on_its_own_prompts_once(batches: list[dict[str, Any]], folder: Path, run: str) -> None:
    """Which prompts a step takes is a function of seed and step, however far ahead they were drawn; groups are complete."""
    sampler = PromptSampler(num_prompts=24, prompts_per_step=PROMPTS, seed=0)
    steps = rollouts(folder, run)
    assert list(steps) == list(range(1, STEPS + 1))
    for step, rows in steps.items():
        counts: dict[str, int] = {}
        for row in rows:
            counts[row["prompt_id"]] = counts.get(row["prompt_id"], 0) + 1
        wanted = {f"train-{i}" for i in sampler.select(step - 1)}
        refilled = {f"train-{i}" for i in sampler.select(step - 1, 1)} if run == "replicas" else set()
        assert wanted <= set(counts) <= wanted | refilled
        assert set(counts.values()) == {GROUP}


@pytest.mark.parametrize(("run", "max_lag"), [("process", MAX_LAG), ("resumed", 1), ("replicas", MAX_LAG)])
def test_no_token_is_older_than_the_lag_and_the_histogram_says_how_old(
    batches: list[dict[str, Any]], folder: Path, run: str, max_lag: int
) -> None:
    steps, rows = rollouts(folder, run), metrics(folder, run)
    for step, row in zip(sorted(steps), rows, strict=True):
        lags = [step - 1 - version for rollout in steps[step] for version in rollout["versions"]]
        assert all(
            r["versions"] == sorted(r["versions"]) and len(r["versions"]) == len(r["token_ids"]) for r in steps[step]
        )
        assert 0 <= min(lags) <= max(lags) <= max_lag
        shares = [row[f"lag/share_{lag}"] for lag in range(max_lag + 1)]
        assert shares == pytest.approx([lags.count(lag) / len(lags) for lag in range(max_lag + 1)])
        assert row["lag/mean"] == pytest.approx(sum(lags) / len(lags))
        assert 0 <= row["lag/overlap_share"] <= 1
    assert rows[0]["lag/share_0"] == 1  # nothing older exists yet
    assert any(row["lag/share_0"] < 1 for row in rows)


def test_a_resumed_run_draws_the_steps_after_its_checkpoint_anew(batches: list[dict[str, Any]], folder: Path) -> None:
    """With the weights of the checkpoint; what the ended run had drawn ahead is gone without a trace."""
    assert {version for row in rollouts(folder, "resumed")[3] for version in row["versions"]} == {2}
    assert [row["step"] for row in metrics(folder, "resumed")] == [1, 2, 3, 4]


def test_weights_are_those_of_the_correction_and_alike_on_all_ranks(
    batches: list[dict[str, Any]], folder: Path
) -> None:
    kinds = {"process": "token_tis", "resumed": "ais", "replicas": "sequence_tis"}
    for run, kind in kinds.items():
        low, high = CORRECTION_BOUNDS[kind]
        for batch in batches[0][run]:
            weights_T = batch.correction_T[batch.mask_T > 0]
            assert ((weights_T >= low) & (weights_T <= high)).all()
            assert not batch.correction_T[batch.mask_T == 0].any()
    assert any(((b.correction_T - b.mask_T).abs() > 1e-3).any() for b in batches[0]["process"])
    for one, other in zip(batches[0]["process"], batches[1]["process"], strict=True):
        assert one.correction_T.equal(other.correction_T)
    for row in metrics(folder, "process"):
        assert row["correction/kl_k3"] >= 0
        assert 0 < row["correction/ess_sequence"] <= 1 + 1e-9
    assert all(0 <= row["correction/blend"] <= 1 for row in metrics(folder, "resumed")[2:])


def test_weights_multiply_the_loss_of_whatever_method_and_its_gradient(batches: list[dict[str, Any]]) -> None:
    """Without a correction the loss is the method's own, bit for bit."""
    found = batches[0]["losses"]
    assert torch.equal(found["plain loss"], found["method"])
    assert torch.equal(found["corrected loss"], found["weights"] * found["plain loss"])
    torch.testing.assert_close(found["corrected gradient"], found["weights"] * found["plain gradient"])
    assert not torch.equal(found["corrected loss"], found["plain loss"])


def test_what_fails_in_the_thread_ends_the_run_with_its_one_line(batches: list[dict[str, Any]], folder: Path) -> None:
    arguments = {"recipe": str(folder / "recipe.yaml"), "folder": str(folder / "failed")}
    with pytest.raises(RanksFailed) as failed:
        run_ranks(__file__, "work_until_it_fails", 2, arguments, folder / "failing", timeout_s=200)
    assert str(failed.value).splitlines()[0] == "rank 0: all servers are gone; start one"
    assert [row["step"] for row in metrics(folder, "failed")] in ([1], [1, 2])

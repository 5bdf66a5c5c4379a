"""Killed and resumed runs equal one that was left alone, to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from megatron_gcpo.cluster import failure, launch
from tests.dist import whole_runs
from tests.dist.harness import fork_ranks
from tests.dist.whole_runs import EVERY, MINI_BATCHES, STEPS, TP2, same, stored_in

ROOT = Path(__file__).parents[2]


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
    processes = fork_ranks(
        whole_runs.__file__, "train_until_killed", 2, arguments, logs, store.port, env, timeout_s=200
    )
    for process in processes:
        process.join()
    codes = {rank: process.exitcode for rank, process in enumerate(processes)}
    rank, why = failure.first_failure(logs / "logs", codes)
    return Attempt(code=codes[1], errors=f"error: rank {rank}: {why}", checkpoints=checkpoints_in(run))


def checkpoints_in(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def attempts(recipe: Path, runs_folder: Path) -> list[Attempt]:
    """One run in three lives: rank 1 is killed in an update of step 4, then rank 0 in the checkpoint of step 4."""
    run = runs_folder / "killed"
    update = (EVERY + 1) * MINI_BATCHES + 1
    return [
        command(recipe, run, f"1 megatron_gcpo.policy.actor Actor.update {update}"),
        forked(recipe, run),
        command(recipe, run),
    ]


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
    attempts: list[Attempt], runs: list[dict[str, Any]], runs_folder: Path
) -> None:
    """To the last bit, but for clocks and memory."""
    straight, killed = (
        [comparable(json.loads(line)) for line in (runs_folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("straight", "killed")
    )
    assert [row["step"] for row in straight] == [*range(1, STEPS + 1), STEPS]
    assert killed == straight


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    clocks = ("time", "perf/", "push/seconds")
    return {name: value for name, value in row.items() if not (name.startswith(clocks) or name.endswith("_s"))}


def test_a_resumed_run_samples_and_pays_the_same_rollouts(
    attempts: list[Attempt], runs: list[dict[str, Any]], runs_folder: Path
) -> None:
    files = sorted((runs_folder / "straight" / "rollouts").iterdir())
    assert [f.name for f in files] == [f"step_{step:06d}_replica_000.parquet" for step in range(1, STEPS + 1)]
    assert [f.name for f in sorted((runs_folder / "killed" / "rollouts").iterdir())] == [f.name for f in files]
    rewards, seen = [], {}
    for file in files:
        table = pq.read_table(file)
        assert table.equals(pq.read_table(runs_folder / "killed" / "rollouts" / file.name)), file.name
        rewards += table["reward"].to_pylist()
        for row in table.to_pylist():
            assert (row["entropies"] is not None) == row["trained"]
            assert not row["trained"] or len(row["entropies"]) == len(row["token_ids"])
        for hashed in set(table["embedding_hash"].to_pylist()) - {None}:
            seen.setdefault(hashed, []).append(file.name)
    assert 0 < sum(rewards) < len(rewards)  # there was something to learn
    assert any(len(steps) > 1 for steps in seen.values())  # and to remember


def test_a_resumed_run_ends_with_the_same_weights_and_optimizer_state(
    attempts: list[Attempt], runs: list[dict[str, Any]], runs_folder: Path
) -> None:
    """Schedule, update counts and random states too."""
    name = f"checkpoints/step_{STEPS:08d}"
    straight, killed = (stored_in(runs_folder / run / name) for run in ("straight", "killed"))
    assert straight.keys() == killed.keys()
    for kind in ("word_embeddings", "exp_avg_sq", "common_state", "random"):
        assert any(kind in key for key in straight), kind
    assert [key for key in straight if not same(straight[key], killed[key])] == []
    before = stored_in(runs_folder / "killed" / f"checkpoints/step_{STEPS - EVERY:08d}")
    weight = "embedding.word_embeddings.weight"
    assert not same(before[weight], killed[weight])


def test_both_runs_sum_up_alike(attempts: list[Attempt], runs: list[dict[str, Any]], runs_folder: Path) -> None:
    straight, killed = (json.loads((runs_folder / run / "summary.json").read_text()) for run in ("straight", "killed"))
    for name in ("step", "before", "after", "skipped_updates", "data"):
        assert straight[name] == killed[name], name

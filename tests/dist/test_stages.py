"""Warm start, dry run, and steps in which some or all groups carry no signal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import yaml

from tests.dist.whole_runs import DAPO_REFILL, MINI_BATCHES, STEPS, stored_in


def test_demonstrations_become_likelier_and_the_next_run_starts_there(
    runs: list[dict[str, Any]], runs_folder: Path
) -> None:
    losses = [update["stats"].loss for update in runs[0]["sft"]["updates"]]
    assert len(losses) == STEPS  # one update a step, whatever train.mini_batches says
    assert losses[-1] < losses[1]
    trained = stored_in(runs_folder / "sft" / f"checkpoints/step_{STEPS:08d}")["embedding.word_embeddings.weight"]
    first = runs[0]["sft"]["updates"][0]["weights"]["model.embed_tokens.weight"]
    for rank in runs:
        start = rank["started"]["model.embed_tokens.weight"]
        assert torch.equal(start, trained)
        assert not torch.equal(start, first)


def test_a_dry_run_prints_the_run_without_starting_it(runs: list[dict[str, Any]]) -> None:
    text = runs[0]["dry_run"]
    assert yaml.safe_load(text.split("rank grid")[0])["train"]["optimizer"]["lr"] == 0.01
    table = [line for line in text.splitlines() if line.startswith("│")]
    assert len(table) == 2
    assert "(leader)" in table[0]
    assert "2 ranks = 1 replicas" in text
    assert "4 prompts x 8 rollouts = 32 sequences, 4 prompts = 32 sequences on each replica" in text
    assert f"updates in a step: {MINI_BATCHES}, each on 2 groups" in text


def test_option_names_are_those_of_megatron(runs: list[dict[str, Any]]) -> None:
    assert runs[0]["names"] == [True, True, True]


def test_dapo_fills_the_step_with_groups_that_carry_signal(runs: list[dict[str, Any]], runs_folder: Path) -> None:
    """From the rollouts on disk: rounds go on until enough groups differ in their rewards, and those alone are trained."""
    wanted, refilled = 2, 0
    for file in sorted((runs_folder / "dapo" / "rollouts").iterdir()):
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
    runs: list[dict[str, Any]], runs_folder: Path
) -> None:
    """No rollout is right, so every group is filtered out: neither momentum nor weight decay may move a weight."""
    for rank in runs:
        updates = rank["wrong"]["updates"]
        assert len(updates) == 2 * MINI_BATCHES
        for update in updates:
            assert (update["stats"].loss, update["stats"].grad_norm, update["stats"].skipped) == (0.0, 0.0, False)
            assert all(torch.equal(w, updates[0]["weights"][name]) for name, w in update["weights"].items())
        for experience in rank["wrong"]["experiences"]:
            assert not any(experience.trained)
    rows = [json.loads(line) for line in (runs_folder / "wrong" / "metrics.jsonl").read_text().splitlines()]
    assert [row["credit/trained_groups_share"] for row in rows] == [0.0, 0.0]
    assert [row["train/skipped_updates"] for row in rows] == [0.0, 0.0]

"""Runs in which the policy judges prompts: two replicas that share numbers alone, one that was interrupted, a critic's run.

The random policy of a few words can say a forecast by chance: its tokenizer has two of them as words.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_gcpo.policy.manifest import read_extra
from megatron_gcpo.types import TokenBatch
from tests.dist.harness import run_ranks
from tests.dist.tiny import write_recipe

FORECASTS = ("\\boxed{0.05}", "\\boxed{0.2}")
COMMON = (
    *("evaluate.every=0", "checkpoint.every=2", "train.scheduler.lr_warmup_steps=0"),
    *("model.hf_config.max_position_embeddings=512", "train.max_tokens_per_micro_batch=512"),
    "model.tokenizer=FOLDER/words",
)
JUDGED = (*COMMON, "data.heldout=null", "method.name=metis", "method.loss.reduce=token_mean")
SAMPLER = "method.sampler={name: judged, max_new_tokens: 6, coef: 0.5}"
CRITIC = (*COMMON, "method.name=recrit", "method.max_tokens=6", "method.buffer=3", "evaluate.samples=4")


def runs(recipe: str, folder: str) -> dict[str, Any]:
    """On each of two ranks, one run after the other."""
    from tests.dist import wiretap
    from tests.dist.whole_runs import secrets_of, train

    def go(name: str, *overrides: str) -> Any:
        own = [override.replace("FOLDER", folder) for override in overrides]
        return train(recipe, *own, f"run.output_dir={folder}/{name}")

    with wiretap.tapped() as payloads:
        straight = go("straight", *JUDGED, SAMPLER, "run.steps=4")
    secrets = [secret for what, secret in secrets_of(straight) if what != "embedding"]
    secrets += [row.tokens_T.numpy().tobytes() for update in straight.updates for row in judged_rows(update["batch"])]
    between = [p for p in payloads if len(p.ranks) > 1]
    go("resumed", *JUDGED, SAMPLER, "run.steps=2", "train.scheduler.lr_decay_steps=4")
    resumed = go("resumed", *JUDGED, SAMPLER, "run.steps=4")
    one_replica = go("one", *JUDGED, SAMPLER, "run.steps=1", "cluster.tensor_model_parallel_size=2")
    untrained = go("untrained", *JUDGED, SAMPLER.replace("0.5", "0.0"), "run.steps=1")
    halves = go("halves", *JUDGED, SAMPLER, "run.steps=1", "train.mini_batches=2", "train.old_logprobs=always")
    go("critic", *CRITIC, "run.steps=1")
    return {
        "straight": straight.updates,
        "resumed": resumed.updates,
        "one_replica": one_replica.updates,
        "untrained": untrained.updates,
        "halves": halves.updates,
        "secrets": len(secrets),
        "between": sum(len(p.data) for p in between),
        "leaks": [secret for secret in secrets for p in between if secret in p.data],
    }


def judged_rows(batch: TokenBatch) -> list[TokenBatch]:
    if batch.reinforce_T is None:
        return []
    marked_T, begins = batch.reinforce_T, batch.cu_seqlens_N1[:-1].tolist()
    return [batch.rows([n]) for n, begin in enumerate(begins) if marked_T[begin]]


def policy_rows(batch: TokenBatch) -> list[TokenBatch]:
    return [batch.rows([n]) for n in range(batch.num_rows - len(judged_rows(batch)))]


def prompts_of(rows: list[TokenBatch]) -> set[tuple[int, ...]]:
    return {tuple(row.tokens_T[: int((row.mask_T == 0).sum())].tolist()) for row in rows}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = Path(tmp_path_factory.mktemp("judged"))
    recipe = write_recipe(folder, rollout={"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6})
    shutil.copytree(folder / "tokenizer", folder / "words")
    path = folder / "words/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for word in (*FORECASTS, "[UNK]"):
        tokenizer["model"]["vocab"][word] = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["unk_token"] = "[UNK]"
    path.write_text(json.dumps(tokenizer))
    arguments = {"recipe": str(recipe), "folder": str(folder)}
    return folder, run_ranks(__file__, "runs", 2, arguments, folder / "ranks", timeout_s=400)


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_forecasts_are_drawn_read_and_trained(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, ranks = whole
    seen = [row for row in metrics_of(folder / "straight") if "judge/reward" in row]
    assert len(seen) == 4
    assert any(0 < row["judge/unreadable_share"] < 1 for row in seen)
    assert all(0 <= row["judge/reward"] <= 1 for row in seen)
    assert all(0.05 <= row["judge/forecast"] <= 0.2 for row in seen if "judge/forecast" in row)
    counts = [sum(len(judged_rows(rank["straight"][step]["batch"])) for rank in ranks) for step in range(4)]
    assert all(1 <= count <= 8 for count in counts)
    advantages = [
        row.advantages_T[row.mask_T > 0]
        for rank in ranks
        for update in rank["straight"][1:]
        for row in judged_rows(update["batch"])
    ]
    assert any((own != 0).all() for own in advantages)
    assert all(not update["stats"].skipped for rank in ranks for update in rank["straight"])


def test_weights_of_the_two_streams_are_their_own_means(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    """Token means over both replicas: the policy's weights sum to 1, the forecasts' to coef."""
    for step in range(4):
        sums = {True: 0.0, False: 0.0}
        for rank in whole[1]:
            batch = rank["straight"][step]["batch"]
            for marked in sums:
                sums[marked] += float(batch.weights_T[batch.reinforce_T == marked].double().sum())
        assert sums[False] == pytest.approx(1, rel=1e-5)
        assert sums[True] == pytest.approx(0.5, rel=1e-5)


def test_no_text_and_no_tokens_leave_their_replica(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in whole[1]:
        assert rank["secrets"] > 40
        assert rank["between"] > 100_000  # gradients and weights did travel
        assert rank["leaks"] == []


def test_one_replica_chooses_and_is_paid_as_two_are(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    """At the first step, where the weights are the same."""
    two, one = ([rank[name][0] for rank in whole[1]] for name in ("straight", "one_replica"))
    assert all(torch.equal(w, one[0]["weights"][name]) for name, w in two[0]["weights"].items())
    chosen = [prompts_of(policy_rows(update["batch"])) for update in two]
    assert not chosen[0] & chosen[1]
    assert chosen[0] | chosen[1] == prompts_of(policy_rows(one[0]["batch"]))
    paid = [
        sorted((row.tokens_T.tolist(), row.advantages_T.tolist()) for u in updates for row in judged_rows(u["batch"]))
        for updates in (two, one[:1])
    ]
    assert len(paid[0]) == len(paid[1]) >= 1
    assert [tokens for tokens, _ in paid[0]] == [tokens for tokens, _ in paid[1]]
    for (_, a), (_, b) in zip(*paid, strict=True):
        assert a == pytest.approx(b, abs=1e-6)
    assert any(abs(advantage) > 0.01 for _, own in paid[0] for advantage in own)
    assert two[0]["stats"].loss == pytest.approx(one[0]["stats"].loss, rel=1e-4, abs=1e-6)
    assert two[0]["stats"].grad_norm == pytest.approx(one[0]["stats"].grad_norm, rel=1e-4)


def test_an_interrupted_run_goes_on_alike(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    """The last outcomes, the baseline, the choice and the weights are those of the run that never stopped."""
    folder, ranks = whole
    states = [
        read_extra(folder / name / "checkpoints/step_00000004")["method_state"] for name in ("straight", "resumed")
    ]
    assert states[0] == states[1]
    assert len(states[0]["sampler"]["recent"]) == 3
    assert math.isfinite(states[0]["sampler"]["baseline"])
    for rank in ranks:
        for went, resumed in zip(rank["straight"][2:], rank["resumed"], strict=True):
            assert went["stats"] == resumed["stats"]
            assert torch.equal(went["batch"].tokens_T, resumed["batch"].tokens_T)
            assert torch.equal(went["batch"].advantages_T, resumed["batch"].advantages_T)
            assert all(torch.equal(w, resumed["weights"][name]) for name, w in went["weights"].items())


def test_forecasts_that_are_not_trained_leave_the_policys_rows_as_they_are(
    whole: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in whole[1]:
        with_them, without = rank["straight"][0]["batch"], rank["untrained"][0]["batch"]
        assert without.reinforce_T is None
        tokens = len(without.tokens_T)
        assert tokens < len(with_them.tokens_T)
        for field in ("tokens_T", "advantages_T", "weights_T", "mask_T"):
            assert torch.equal(getattr(with_them, field)[:tokens], getattr(without, field))


def test_mini_batches_share_the_forecasts(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in whole[1]:
        counts = [len(judged_rows(update["batch"])) for update in rank["halves"]]
        assert len(counts) == 2
        assert abs(counts[0] - counts[1]) <= 1
        assert sum(counts) == len(judged_rows(rank["straight"][0]["batch"]))


def test_evaluations_see_the_whole_conversation(whole: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = whole
    summary = json.loads((folder / "critic/summary.json").read_text())
    for when in ("before", "after"):
        found = summary[when]
        assert found["first_turn"] + found["repaired"] - found["broken"] == pytest.approx(found["avg"])
        assert sum(found[name] for name in ("repaired", "held", "broken", "lost")) == pytest.approx(1)
        assert 2 <= found["mean_tokens"] <= 12

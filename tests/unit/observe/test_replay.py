"""Replayed credit equals what the methods pay directly; comparisons count what they say they count."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from megatron_gcpo.credit import gcpo_advantages
from megatron_gcpo.embed import kept
from megatron_gcpo.observe import replay
from megatron_gcpo.observe.history import read_history
from megatron_gcpo.observe.rollouts import SCHEMA
from tools import replay_credit

E = {"a": [1.0, 0.0, 0.0], "b": [0.0, 1.0, 0.0], "c": [0.0, 0.0, 1.0]}


class Axes:
    """Encodes a text by its first letter."""

    def encode(self, texts) -> torch.Tensor:
        return torch.tensor([E[text[0]] for text in texts])


def table(*groups: tuple[list[str], list[float], list[float]]) -> pa.Table:
    rows = [
        {
            "step": step,
            "prompt_id": f"p{step}",
            "sample": i,
            "prompt": "?",
            "text": text,
            "token_ids": list(range(len(text))),
            "logprobs": [-0.5] * len(text),
            "reward": reward,
            "advantage": advantage,
        }
        for step, (texts, rewards, advantages) in enumerate(groups, start=1)
        for i, (text, reward, advantage) in enumerate(zip(texts, rewards, advantages, strict=True))
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA).select(replay.COLUMNS)


TWINS = (["a1", "a2", "b34", "c"], [1.0, 1.0, 1.0, 0.0], [0.5, 0.5, 0.5, -1.5])


def test_groups_are_those_of_the_table_even_across_chunks() -> None:
    one, two = table(TWINS), table((["b", "cc"], [0.0, 1.0], [-1.0, 1.0]))
    groups = replay.saved_groups(pa.concat_tables([one, two]))
    assert [len(group.texts) for group in groups] == [4, 2]
    assert groups[0].lengths_G.tolist() == [2, 2, 3, 1]
    assert groups[0].logprobs_G.tolist() == [-1.0, -1.0, -1.5, -0.5]
    assert groups[1].logprobs_G.tolist() == [-0.5, -1.0]


def test_gcpo_replayed_is_gcpo_computed() -> None:
    (group,) = replay.embed(replay.saved_groups(table(TWINS)), Axes(), "completion")
    variants = replay.make_variants(["gcpo", "grpo"], ["logdet", "det"], [1.0, 10.0], {"gcpo": {"normalize": "std"}})
    assert [v.label for v in variants] == [
        "gcpo value=logdet c=1.0",
        "gcpo value=logdet c=10.0",
        "gcpo value=det c=1.0",
        "gcpo value=det c=10.0",
        "grpo",
    ]
    embeddings = torch.tensor([E["a"], E["a"], E["b"], [0.0] * 3])
    for variant, (value, c) in zip(
        variants, (("logdet", 1.0), ("logdet", 10.0), ("det", 1.0), ("det", 10.0)), strict=False
    ):
        expected = gcpo_advantages(embeddings, torch.tensor(TWINS[1]), value=value, c=c, normalize="std")
        assert replay.pay(group, variant).tolist() == pytest.approx(np.asarray(expected).tolist(), abs=1e-9)
    assert np.ptp(replay.pay(group, variants[-1]).numpy()[:3]) == 0, "GRPO does not tell twins from others"


def test_comparison_counts_pairs_signs_and_kinds() -> None:
    (group,) = replay.embed(replay.saved_groups(table(TWINS)), Axes(), "completion")
    ours = np.array([-0.1, -0.1, 1.2, -1.0])
    found = replay.compare([group], "x", [ours])
    assert found.pairs_reordered == 2 / 6, "the twins now differ from b, all else keeps its order"
    assert found.signs_changed == 2 / 4
    assert found.mean_advantage["wrong"] == -1.0
    assert found.mean_advantage["correct"] == pytest.approx(1.0 / 3)
    assert found.mean_advantage["longest"] == 1.2
    same = replay.compare([group], "as trained", [group.advantages_G])
    assert (same.pairs_reordered, same.signs_changed, same.groups_with_signal) == (0, 0, 1)
    (mover,) = replay.movers([group], [np.array([0.0, 2.0, 1.0, 3.0])])
    assert (mover.sample, mover.rank_before, mover.rank_after, mover.text) == (3, 3, 0, "c")


def test_redundant_and_different_are_told_apart_by_the_nearest_correct_rollout() -> None:
    (group,) = replay.embed(
        replay.saved_groups(table((["a", "a", "b", "c"], [1, 1, 1, 0], [0, 0, 0, 0]))), Axes(), "completion"
    )
    found = replay.compare([group, group], "x", [np.array([1.0, 2.0, 5.0, 9.0])] * 2)
    assert "correct_redundant" not in found.mean_advantage, "no cosine exceeds the median, which is 1"
    assert found.mean_advantage["correct_different"] == pytest.approx(8 / 3)


def test_command_reads_a_run_and_encodes_once(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    class Counting(Axes):
        def __init__(self, *_: object) -> None:
            calls.append("load")

    monkeypatch.setattr(kept, "Encoder", Counting)
    (tmp_path / "rollouts").mkdir()
    rows = [{**row, "policy_version": 0} for row in table(TWINS, TWINS).to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "rollouts" / "step_000001_replica_000.parquet")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"method": {"name": "gcpo"}, "embed": {"span": "completion"}}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    for _ in range(2):
        assert replay_credit.main([str(tmp_path), "--method", "gcpo,grpo", "--c", "1,10"]) == 0
    assert calls == ["load"]
    printed = capsys.readouterr().out
    assert "2 groups x 3 variants" in printed
    saved = json.loads((tmp_path / "replay" / "credit.json").read_text())
    assert [row["label"] for row in saved] == [
        "as trained",
        "gcpo value=logdet c=1.0",
        "gcpo value=logdet c=10.0",
        "grpo",
    ]
    assert replay_credit.main([str(tmp_path), "--method", "darlin"]) == 2
    assert "did you mean darling?" in capsys.readouterr().err
    assert replay_credit.main([str(tmp_path), "--first-step", "9"]) == 2
    assert "has no saved rollouts" in capsys.readouterr().err


def test_command_replays_what_is_whole_and_says_what_it_skipped(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A group without advantages, a torn file, and a configuration of another version."""
    (tmp_path / "rollouts").mkdir()
    whole = table(TWINS, TWINS)
    torn = whole.set_column(whole.column_names.index("advantage"), "advantage", pa.array([None] * 4 + [0.5] * 4))
    for step, content in ((1, whole), (2, torn)):
        pq.write_table(content, tmp_path / "rollouts" / f"step_{step:06d}_replica_000.parquet")
    (tmp_path / "rollouts" / "step_000003_replica_000.parquet").write_bytes(b"PAR1")
    config = {"method": {"name": "grpo", "temperament": 3}, "embed": {"span": "everything", "old": 1, "batch_size": 8}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert replay_credit.main([str(tmp_path), "--method", "grpo"]) == 0
    printed = capsys.readouterr().out
    assert "3 groups x 1 variants" in printed
    for part in (
        "skipped: metrics.jsonl: missing",
        "skipped: config.yaml: embed.old, embed.span of another version",
        "skipped: config.yaml: its method section",
        "step_000003_replica_000.parquet: not readable",
        "groups without advantage in 1 files",
    ):
        assert part in printed
    config, skipped = replay.embed_config(read_history(tmp_path), span="wording")
    assert (config.span, config.batch_size, config.encoder) == ("wording", 8, "minilm")
    assert len(skipped) == 1
    (tmp_path / "rollouts" / "step_000001_replica_000.parquet").unlink()
    (tmp_path / "rollouts" / "step_000002_replica_000.parquet").unlink()
    assert replay_credit.main([str(tmp_path), "--method", "grpo"]) == 2
    assert "no saved rollouts that can be replayed" in capsys.readouterr().err

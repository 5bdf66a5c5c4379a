"""Rollouts on disk: what was sampled comes back, and the hash finds the embedding that was used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from megatron_gcpo.config.records import EmbedConfig
from megatron_gcpo.embed import encoder as encoders
from megatron_gcpo.embed.encoder import Encoder, content_hash
from megatron_gcpo.observe.rollouts import SCHEMA, drop_rollouts_after, write_rollouts
from megatron_gcpo.types import Credit, Group, Prompt, Rollout, Verdicts


def group(name: str, texts: list[str]) -> Group:
    rollouts = [
        Rollout(
            token_ids=np.arange(len(text) + 1),
            logprobs=np.linspace(-1, -1e-7, len(text) + 1, dtype=np.float32),
            text=text,
            finish_reason="stop" if i else "length",
            versions_T=np.full(len(text) + 1, 3, np.int32),
        )
        for i, text in enumerate(texts)
    ]
    return Group(prompt=Prompt(id=name, token_ids=(1, 2), text=f"ask {name}", answer="4"), rollouts=tuple(rollouts))


def write(folder: Path, step: int = 7, replica: int = 1) -> Path:
    groups = [group("a", ["two\nand two", "\ud800 torn ünï"]), group("b", ["", "x" * 50])]
    verdicts = [
        Verdicts(rewards_G=np.array([1, 0.5], dtype=np.float32), statuses_G=("ok", "ok")),
        Verdicts(rewards_G=np.array([0, 0], dtype=np.float32), statuses_G=("timeout", "ok")),
    ]
    credits = [
        Credit(credits_G=torch.tensor([1 / 3, 2.0]).double(), advantages_G=torch.tensor([0.1, -0.1]).double()),
        Credit(
            credits_G=torch.zeros(2).double(),
            advantages_G=torch.zeros(2).double(),
            token_advantages_G=(torch.ones(1).double(), torch.arange(51).double()),
        ),
    ]
    spans = [["two", "\ud800 torn"], [None, None]]
    entropies = [[np.linspace(0, 2, len(r.token_ids), dtype=np.float32) for r in groups[0].rollouts], None]
    return write_rollouts(folder, step, replica, groups, verdicts, credits, [True, False], spans, entropies)


def test_every_rollout_comes_back(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts")
    table = pq.read_table(path)
    assert path.name == "step_000007_replica_001.parquet"
    assert table.schema.equals(SCHEMA)
    rows = table.to_pylist()
    assert [(r["prompt_id"], r["sample"], r["trained"]) for r in rows] == [
        ("a", 0, True),
        ("a", 1, True),
        ("b", 0, False),
        ("b", 1, False),
    ]
    assert rows[1]["text"] == "? torn ünï"
    first = rows[0]
    assert first["text"] == "two\nand two"
    assert first["token_ids"] == list(range(12))
    assert np.array_equal(np.float32(first["logprobs"]), np.linspace(-1, -1e-7, 12, dtype=np.float32))
    assert (first["credit"], first["advantage"]) == (float(np.float32(1 / 3)), float(np.float32(0.1)))
    assert (first["reward"], first["verdict"], first["finish_reason"]) == (1.0, "ok", "length")
    assert rows[2]["verdict"] == "timeout"
    assert (first["prompt"], first["answer"], first["step"], first["policy_version"]) == ("ask a", "4", 7, 3)
    assert first["versions"] == [3] * len(first["token_ids"])
    assert np.array_equal(np.float32(first["entropies"]), np.linspace(0, 2, 12, dtype=np.float32))
    assert [r["entropies"] for r in rows[2:]] == [None, None], "the trainer never saw this group"
    assert [r["token_advantages"] for r in rows[:2]] == [None, None]
    assert rows[3]["token_advantages"] == list(range(51))


def test_the_hash_is_the_key_of_the_encoder_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        dim = 2

        def __init__(self, *_: object) -> None: ...

        def encode(self, texts: list[str]) -> tuple[torch.Tensor, list[bool]]:
            return torch.ones(len(texts), 2), [False] * len(texts)

    monkeypatch.setattr(encoders, "SentenceModel", Model)
    encoder = Encoder(EmbedConfig(), torch.device("cpu"))
    encoder.encode(["two", "\ud800 torn"])
    rows = pq.read_table(write(tmp_path)).to_pylist()
    assert {r["embedding_hash"] for r in rows[:2]} == set(encoder._cache)
    assert [r["embedding_hash"] for r in rows[2:]] == [None, None]
    assert rows[0]["embedding_hash"] == content_hash("two")


def test_a_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda *_: pytest.fail("killed"))
    with pytest.raises(BaseException, match="killed"):
        write(tmp_path)
    assert list(tmp_path.glob("*.parquet")) == []


def test_steps_that_run_again_lose_their_files_of_all_replicas(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        for replica in (0, 1):
            write(tmp_path, step, replica)
    (tmp_path / "step_000003_replica_000.tmp").touch()
    drop_rollouts_after(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"step_00000{step}_replica_00{replica}.parquet" for step in (1, 2) for replica in (0, 1)
    ]
    drop_rollouts_after(tmp_path / "none", 0)

"""A run folder is read as far as it goes, and says what it skipped."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megatron_gcpo.observe.history import GROUPED, group_bounds, read_history, read_rollouts
from megatron_gcpo.observe.rollouts import SCHEMA
from megatron_gcpo.observe.summary import Summary


def rollouts(step: int, num: int = 2) -> pa.Table:
    rows = [{"step": step, "prompt_id": "p", "sample": i, "text": "x", "reward": 1.0} for i in range(num)]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"run": {"name": "demo", "steps": 3}}))
    lines = [json.dumps({"step": s, "time": 1.0, "reward/mean": s / 10, "bad": None}) for s in (1, 2, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for step in (2, 1):
        pq.write_table(rollouts(step), tmp_path / "rollouts" / f"step_{step:06d}_replica_000.parquet")
    return tmp_path


def test_a_sound_folder(folder: Path) -> None:
    history = read_history(folder)
    assert (history.name, history.step, history.steps, history.finished, history.skipped) == ("demo", 2, 3, False, ())
    assert history.series("reward/mean") == ([1, 2], [0.1, 0.2])
    assert history.series("bad") == history.series("unheard of") == ([], [])
    assert [file.step for file in history.rollout_files] == [1, 2]
    table, skipped = read_rollouts(history.rollout_files)
    assert table.schema == SCHEMA
    assert table["step"].to_pylist() == [1, 1, 2, 2]
    assert skipped == ()
    assert read_rollouts(history.rollout_files, ["reward"])[0].column_names == ["reward"]


def test_finished_when_the_summary_says_all_steps(folder: Path) -> None:
    Summary(step=2).write(folder)
    assert not read_history(folder).finished
    Summary(step=3).write(folder)
    assert read_history(folder).finished


def test_torn_and_foreign_pieces_are_passed_over_and_named(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"loss": 1}\n{"step": 3, "rew')
    (folder / "config.yaml").write_text("run: [unclosed")
    (folder / "summary.json").write_text('{"from": "another version"}')
    (folder / "rollouts" / "step_000003_replica_000.parquet").write_bytes(b"PAR1 torn")
    (folder / "rollouts" / "notes.parquet").write_bytes(b"")
    old = rollouts(4).drop_columns(["policy_version"]).append_column("mood", pa.array(["fine", "fine"]))
    pq.write_table(old, folder / "rollouts" / "step_000004_replica_000.parquet")

    history = read_history(folder)
    assert history.step == 2
    assert history.name == folder.name
    text = "\n".join(history.skipped)
    for part in (
        "1 line cut off",
        "1 line without a step",
        "config.yaml: not readable",
        "summary.json",
        "notes.parquet",
    ):
        assert part in text

    table, skipped = read_rollouts(history.rollout_files)
    assert table["step"].to_pylist() == [1, 1, 2, 2, 4, 4]
    assert table["policy_version"].to_pylist()[-2:] == [None, None]
    text = "\n".join(skipped)
    for part in ("step_000003_replica_000.parquet: not readable", "lacks column policy_version", "unknown column mood"):
        assert part in text


def test_no_run_at_all_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no run folder .*/nowhere: give the run\.output_dir"):
        read_history(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds nothing of a run"):
        read_history(tmp_path)


def test_only_groups_that_have_what_is_needed_are_kept(tmp_path: Path) -> None:
    """Three groups of two; the second lacks a text, and a file without ``sample`` has no groups at all."""
    whole = pa.concat_tables([rollouts(1), rollouts(1), rollouts(1)])
    texts = pa.array(["a", "b", "c", None, "e", "f"])
    torn = whole.set_column(whole.column_names.index("text"), "text", texts)
    files = []
    (tmp_path / "config.yaml").write_text("run: {steps: 3}")
    (tmp_path / "rollouts").mkdir()
    for step, table in ((1, torn), (2, rollouts(2).drop_columns(["sample"])), (3, rollouts(3))):
        pq.write_table(table, tmp_path / "rollouts" / f"step_{step:06d}_replica_000.parquet")
    files = read_history(tmp_path).rollout_files

    table, skipped = read_rollouts(files, needed=(*GROUPED, "text"))
    assert table["text"].to_pylist() == ["a", "b", "e", "f", "x", "x"]
    assert group_bounds(table) == [(0, 2), (2, 4), (4, 6)]
    assert any("groups without text, sample in 2 files, e.g. step_000001" in line for line in skipped)
    assert len(read_rollouts(files)[0]) == 8, "who needs only groups gets all of them"
    assert group_bounds(read_rollouts([])[0]) == []


def test_many_unreadable_files_are_one_line(folder: Path) -> None:
    for step in range(3, 9):
        (folder / "rollouts" / f"step_{step:06d}_replica_000.parquet").write_bytes(b"PAR1")
    _, skipped = read_rollouts(read_history(folder).rollout_files)
    assert len(skipped) == 1
    assert "step_000003_replica_000.parquet and 5 more: not readable" in skipped[0]


def test_values_of_the_wrong_kind_are_passed_over(folder: Path) -> None:
    (folder / "config.yaml").write_text("run: {steps: many, name: 7}\nmethod: gcpo\n")
    with (folder / "metrics.jsonl").open("a") as file:
        for step, value in ((3, "NaN"), (4, '"high"'), (5, "true"), (6, "1e999"), (7, "0.7"), ("true", "0.1")):
            file.write(f'{{"step": {step}, "reward/mean": {value}}}\n')
    history = read_history(folder)
    assert history.series("reward/mean") == ([1, 2, 7], [0.1, 0.2, 0.7])
    assert (history.steps, history.method, history.name, history.finished) == (None, "?", "7", False)
    for content in ({"step": 3, "after": {"pass@1": "high"}}, {"step": 3, "before": [1]}, {"step": "three"}):
        (folder / "summary.json").write_text(json.dumps(content))
        history = read_history(folder)
        assert history.summary is None
        assert "no summary of this version" in history.skipped[-1]

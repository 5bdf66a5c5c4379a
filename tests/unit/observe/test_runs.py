"""The list of runs: which folders are runs, in what state, with which numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from megatron_gcpo.observe.history import read_history
from megatron_gcpo.observe.runs import find_runs, runs_table, state
from megatron_gcpo.observe.summary import Summary


def make_run(folder: Path, steps_done: int, after: dict[str, float] | None = None) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": {"steps": 2}, "method": {"name": "gcpo"}}))
    rows = [{"step": s, "time": 0.0, "reward/mean": 0.5, "time/total_s": 2.0} for s in range(1, steps_done + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if after is not None:
        Summary(step=steps_done, after=after).write(folder)


def printed(root: Path, now: float) -> str:
    console = Console(width=300, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(runs_table(root, now))
    return console.export_text()


def test_runs_are_found_at_any_depth_and_told_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "seed0", 2, {"pass@1": 0.875})
    make_run(tmp_path / "b", 1)
    (tmp_path / "a" / "notes").mkdir()
    assert [p.relative_to(tmp_path).as_posix() for p in find_runs(tmp_path)] == ["a/seed0", "b"]

    wrote = read_history(tmp_path / "b").modified
    assert state(read_history(tmp_path / "a" / "seed0"), wrote) == "finished"
    assert state(read_history(tmp_path / "b"), wrote + 5) == "active, 5 s ago"
    assert state(read_history(tmp_path / "b"), wrote + 6000) == "stopped"

    rows = printed(tmp_path, wrote + 6000).splitlines()
    done, stopped = (next(row for row in rows if name in row) for name in ("seed0", "stopped"))
    assert all(part in done for part in ("finished", "2/2", "gcpo", "0.500", "0.875", "2.000"))
    assert "1/2" in stopped


def test_a_folder_without_runs_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no run in"):
        runs_table(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        runs_table(tmp_path / "gone")


def test_what_cannot_be_read_is_listed_below_and_hides_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "good", 2, {"pass@1": 0.875})
    make_run(tmp_path / "torn", 2)
    with (tmp_path / "torn" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "config.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "noise" / "metrics.jsonl").write_text("")
    lines = printed(tmp_path, 0.0).splitlines()
    assert any("good" in line and "0.875" in line for line in lines)
    assert any("noise" in line and "unreadable" in line for line in lines)
    assert any("torn: skipped metrics.jsonl: 1 line cut off" in line for line in lines)
    assert any("noise holds nothing of a run (config.yaml: not readable" in line for line in lines)

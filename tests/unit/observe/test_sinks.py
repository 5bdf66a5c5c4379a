"""What survives a kill in metrics.jsonl, and what TensorBoard is given."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_gcpo.config import validate
from megatron_gcpo.observe.sinks import JsonLines, open_sinks, read_metrics


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(file: Path, steps: range, resume_step: int = 0) -> None:
    sink = JsonLines(file, resume_step)
    for step in steps:
        sink.write(step, {"x": step / 2})
    sink.close()


def steps(file: Path) -> list[int]:
    return [row["step"] for row in read_metrics(file)]


def test_every_step_is_one_line_of_json(file: Path) -> None:
    write(file, range(1, 4))
    lines = file.read_text().splitlines()
    assert [json.loads(line)["x"] for line in lines] == [0.5, 1.0, 1.5]
    assert all(json.loads(line)["time"] > 0 for line in lines)


def test_numbers_are_kept_to_the_last_bit(file: Path) -> None:
    sink = JsonLines(file, 0)
    sink.write(1, {"third": 1 / 3, "tiny": 5e-324})
    sink.close()
    assert read_metrics(file)[0] == {"step": 1, "time": read_metrics(file)[0]["time"], "third": 1 / 3, "tiny": 5e-324}


def test_what_is_not_finite_becomes_null(file: Path) -> None:
    sink = JsonLines(file, 0)
    sink.write(1, {"nan": math.nan, "inf": -math.inf})
    sink.close()
    row = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert row["nan"] is None
    assert row["inf"] is None


@pytest.mark.parametrize("keep", [1, 10, -2])
def test_a_torn_last_line_is_passed_over_and_replaced(file: Path, keep: int) -> None:
    """A kill may leave any beginning of the last line, with or without its end of line."""
    write(file, range(1, 4))
    *whole, last = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole) + last[:keep])
    assert steps(file) == [1, 2]
    write(file, range(3, 5), resume_step=2)
    assert steps(file) == [1, 2, 3, 4]
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_resumed_run_drops_the_steps_that_run_again(file: Path) -> None:
    write(file, range(1, 8))
    write(file, range(5, 7), resume_step=4)
    assert steps(file) == [1, 2, 3, 4, 5, 6]


def test_a_kill_while_dropping_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, range(1, 4))
    monkeypatch.setattr(Path, "replace", lambda *_: pytest.fail("killed"))
    with pytest.raises(BaseException, match="killed"):
        JsonLines(file, 1)
    assert steps(file) == [1, 2, 3]


def test_a_run_without_a_file_has_no_metrics(file: Path) -> None:
    assert read_metrics(file) == []


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = validate(
        {
            "model": {"hf_config": {"model_type": "qwen3"}, "tokenizer": "task"},
            "data": {"train": {"kind": "task", "name": "addition"}},
            "train": {"optimizer": {"lr": 1.0}},
        },
        origin="test",
    )
    sinks = open_sinks(config, tmp_path, 0)
    assert len(sinks) == 2
    for step in (1, 2):
        for sink in sinks:
            sink.write(step, {"reward/mean": step / 4})
    for sink in sinks:
        sink.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]

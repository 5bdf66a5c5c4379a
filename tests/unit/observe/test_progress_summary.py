"""What a person reads while and after a run."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatron_gcpo.observe.progress import ProgressBar
from megatron_gcpo.observe.report import _update_metrics
from megatron_gcpo.observe.summary import Summary, print_summary, read_summary
from megatron_gcpo.types import UpdateStats

METRICS = {"reward/mean": 0.75, "credit/team_value": 3.14159, "train/entropy": 0.5, "time/total_s": 2.0, "x": 9.0}


def watch(steps: int, done: int = 0, *, terminal: bool, shown: bool = True) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, force_interactive=terminal)
    with ProgressBar("run", steps, done, console, shown) as bar:
        for step in range(done + 1, steps + 1):
            bar.advance(step, METRICS)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_gets_a_line_now_and_then_with_four_numbers() -> None:
    lines = watch(100, terminal=False).splitlines()
    assert len(lines) == 10
    assert lines[0] == "run 10/100  reward 0.75  team 3.14  entropy 0.5  s/step 2"
    assert lines[-1].startswith("run 100/100")


def test_a_log_of_a_short_run_has_every_step_and_of_an_odd_one_its_last() -> None:
    assert len(watch(3, terminal=False).splitlines()) == 3
    assert watch(25, terminal=False).splitlines()[-1].startswith("run 25/25")


def test_a_terminal_gets_one_bar_that_starts_where_the_run_does() -> None:
    text = watch(10, done=4, terminal=True)
    assert "10/10" in text
    assert "reward 0.75  team 3.14  entropy 0.5  s/step 2" in text
    assert "run 5/10" not in text  # no lines beside the bar


def test_other_ranks_show_nothing() -> None:
    assert watch(10, terminal=True, shown=False) == watch(10, terminal=False, shown=False) == ""


def test_numbers_that_a_step_lacks_are_left_out() -> None:
    console = Console(file=io.StringIO())
    with ProgressBar("run", 1, 0, console, True) as bar:
        bar.advance(1, {"train/entropy": 1.0})
    assert console.file.getvalue() == "run 1/1  entropy 1\n"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_summary_grows_step_by_step_and_survives_json(tmp_path: Path) -> None:
    summary = Summary(before={"pass@1": 0.5}, data="abc")
    later = summary.after_step({"update": 1.0, "total": 2.0}, 0).after_step({"update": 0.5, "total": 1.0}, 2)
    assert (later.step, later.skipped_updates) == (2, 2)
    assert later.phase_seconds == {"update": 1.5, "total": 3.0}
    assert summary == Summary(before={"pass@1": 0.5}, data="abc")
    later.write(tmp_path)
    assert read_summary(tmp_path) == later
    assert Summary(**later.to_json()) == later


def test_only_finished_runs_have_a_summary(tmp_path: Path) -> None:
    assert read_summary(tmp_path) is None
    for text in ("{", '{"steps": 3}', "[]"):
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(ValueError, match="is no summary of this version"):
            read_summary(tmp_path)


def printed(summary: Summary, folder: Path) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_summary(summary, "run", folder, console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_before_and_after_stand_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "checkpoints").mkdir()
    summary = Summary(
        step=4,
        before={"pass@1": 0.5, "distinct@8": 1.0},
        after={"prompts": 64.0, "pass@1": 0.75, "vendi": 2.0},
        phase_seconds={"generate": 6.0, "embed": 0.0, "update": 2.0, "total": 8.0},
        skipped_updates=1,
    )
    text = printed(summary, tmp_path)
    assert "run: 64 held-out problems" in text
    rows = [line.split()[:4] for line in text.split("time of")[0].splitlines() if "@" in line or " vendi" in line]
    assert "before   after   change" in text
    assert rows == [
        ["pass@1", "0.500", "0.750", "+0.250"],
        ["distinct@8", "1.000", "-", "-"],
        ["vendi", "-", "2.000", "-"],
    ]
    assert "time of 4 steps: 8 s = generate 75.0%, update 25.0%" in text
    assert "1 updates were skipped" in text
    assert f"saved in {tmp_path}: metrics.jsonl, checkpoints/\n" in text


def test_the_newest_two_evaluations_are_remembered() -> None:
    summary = Summary(before={"pass@1": 0.1})
    assert list(summary.evaluations()) == ["before"]
    for step in (10, 20, 30):
        summary = replace(summary, step=step).evaluated({"pass@1": step / 100})
    assert summary.evaluations() == {"before": {"pass@1": 0.1}, "step 20": {"pass@1": 0.2}, "step 30": {"pass@1": 0.3}}
    assert Summary(**summary.to_json()) == summary
    done = replace(summary, after={"pass@1": 0.9})
    assert list(done.evaluations()) == ["before", "step 30", "after"]
    assert Summary().evaluations() == {}


def test_a_run_without_evaluations_prints_no_table(tmp_path: Path) -> None:
    text = printed(Summary(step=1, phase_seconds={"total": 1.0, "update": 1.0}), tmp_path)
    assert "held-out" not in text
    assert "skipped" not in text


def test_updates_of_a_step_are_averaged_and_skipped_ones_counted() -> None:
    updates = [
        UpdateStats(loss=1.0, grad_norm=2.0, skipped=False, learning_rate=0.1, metrics={"entropy": 0.5}),
        UpdateStats(loss=3.0, grad_norm=4.0, skipped=True, learning_rate=0.1, metrics={"entropy": 1.5}),
    ]
    assert _update_metrics(updates) == {
        "train/loss": 2.0,
        "train/grad_norm": 3.0,
        "train/learning_rate": 0.1,
        "train/useful_token_share": 1.0,
        "train/entropy": 1.0,
        "train/skipped_updates": 1.0,
    }


def test_an_update_without_tokens_is_no_measurement_unless_there_is_no_other() -> None:
    """Its groups were all filtered out: 0 entropy and loss were not measured and must not pull the mean down."""
    real = UpdateStats(loss=1.0, grad_norm=2.0, skipped=False, learning_rate=0.1, metrics={"entropy": 0.5})
    empty = UpdateStats(
        loss=0.0, grad_norm=0.0, skipped=False, learning_rate=0.1, metrics={"entropy": 0.0}, useful_token_share=0.0
    )
    assert _update_metrics([real, empty]) == _update_metrics([real])
    assert _update_metrics([empty, empty])["train/loss"] == 0.0

"""Files written by processes: what a kill, a full disk or an error leaves, and what goes on from there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_gcpo.convert import work
from megatron_gcpo.convert.work import Job, Options, Output

JOBS = [Job(file=f"f{n}", num_bytes=10 + n) for n in range(5)]


def content(number: int) -> bytes:
    return bytes([number]) * (10 + number)


def write(number: int, output: Output) -> str:
    output.write(content(number)[:3])
    output.write(memoryview(content(number))[3:])
    return f"result {number}"


@pytest.mark.parametrize("processes", [1, 2, 7])
def test_files_records_and_results(processes: int, tmp_path: Path) -> None:
    target = tmp_path / "out"
    records = work.carry_out(target, JOBS, write, {"source": 1}, Options(processes=processes))
    partial = work.partial_of(target)
    for number, record in enumerate(records):
        assert (partial / f"f{number}").read_bytes() == content(number)
        assert record.sha256 == hashlib.sha256(content(number)).hexdigest()
        assert (record.num_bytes, record.result) == (10 + number, f"result {number}")
    assert set(work.lasting_files(partial)) == {f"f{n}" for n in range(5)}
    work.finish(target)
    assert sorted(p.name for p in target.iterdir()) == [f"f{n}" for n in range(5)]
    assert not partial.exists()


def stop_at(stop: int, action: Any) -> Any:
    def writer(number: int, output: Output) -> str:
        if number == stop:
            output.write(b"torn")
            action()
        return write(number, output)

    return writer


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("tensor 'x' holds NaN")


def fill() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("action", "message"),
    [(kill, r"exit code -9 .* goes on where it stopped"), (fail, "tensor 'x' holds NaN"), (fill, "disk of .* is full")],
)
def test_a_conversion_that_stops_goes_on_with_what_is_missing(action: Any, message: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        work.carry_out(target, JOBS, stop_at(3, action), {"source": 1}, Options(processes=2))
    partial = work.partial_of(target)
    assert not target.exists()
    complete = {p.stem for p in (partial / work.RECORDS).glob("*.json")}
    assert "f3" not in complete
    assert len(complete & {"f0", "f1", "f2"}) >= 2  # the other process may have been at the third

    again: list[int] = []

    def counting(number: int, output: Output) -> str:
        again.append(number)
        return write(number, output)

    work.carry_out(target, JOBS, counting, {"source": 1}, Options(processes=1))
    assert {f"f{n}" for n in again} == {job.file for job in JOBS} - complete
    work.finish(target)
    assert [(target / f"f{n}").read_bytes() for n in range(5)] == [content(n) for n in range(5)]


def test_what_was_left_by_another_conversion_is_not_gone_on_with(tmp_path: Path) -> None:
    target = tmp_path / "out"
    work.carry_out(target, JOBS, write, {"source": 1}, Options())
    written: list[int] = []

    def counting(number: int, output: Output) -> str:
        written.append(number)
        return write(number, output)

    (work.partial_of(target) / "f1").write_bytes(b"shortened")
    work.carry_out(target, JOBS, counting, {"source": 1}, Options())
    assert written == [1]
    work.carry_out(target, JOBS, counting, {"source": 2}, Options())
    assert written == [1, 0, 1, 2, 3, 4]
    (work.partial_of(target) / work.PLAN).write_text("{torn")
    work.carry_out(target, JOBS[:1], counting, {"source": 2}, Options())
    assert written == [1, 0, 1, 2, 3, 4, 0]


def test_too_little_space_is_said_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "free_bytes", lambda path: 20)
    with pytest.raises(ValueError, match=r"0\.00 GiB are to be written"):
        work.carry_out(tmp_path / "out", JOBS, fail, {}, Options())


def test_a_target_that_exists_is_replaced_only_when_asked_and_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(ValueError, match="exists: choose another folder, or pass --overwrite"):
        work.check_target(target, Options())
    work.check_target(target, Options(overwrite=True))  # it is empty
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="not written by a conversion"):
        work.check_target(target, Options(overwrite=True))
    (target / "manifest.json").write_text("{}")
    work.check_target(target, Options(overwrite=True))
    with pytest.raises(ValueError, match="is no folder: make it first"):
        work.check_target(tmp_path / "nowhere" / "out", Options())

    with pytest.raises(ValueError, match="NaN"):
        work.carry_out(target, JOBS, stop_at(2, fail), {}, Options(overwrite=True))
    assert (target / "thesis.tex").exists()
    work.carry_out(target, JOBS, write, {}, Options(overwrite=True))
    work.finish(target)
    assert sorted(p.name for p in target.iterdir()) == [f"f{n}" for n in range(5)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_impossible_options() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Options(processes=0)


def test_the_bar_ends_at_the_total(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work.carry_out(tmp_path / "out", JOBS, write, {}, Options(progress=True, processes=2))
    assert "0.00 GB in" in capsys.readouterr().err
    assert json.loads((work.partial_of(tmp_path / "out") / work.PLAN).read_text())["jobs"][4] == ["f4", 14]

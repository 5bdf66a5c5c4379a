"""Grids, their execution with a trainer that only writes results, and what is made of the results."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import sys
import threading
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_gcpo.ablate import jobs
from megatron_gcpo.ablate.execute import Stopped, run_here
from megatron_gcpo.ablate.grid import cells, load_ablation
from megatron_gcpo.ablate.jobs import cell_jobs, check_settings, unfinished, warm_starts
from megatron_gcpo.ablate.plots import draw
from megatron_gcpo.ablate.summarize import fit_trends, markdown, summarize
from megatron_gcpo.config import load
from tools import ablate

TRAINER = f"""#!{sys.executable}
import json, pathlib, sys, time
settings = dict(s.split("=", 1) for s in sys.argv[2:] if "=" in s)
folder = pathlib.Path(settings["run.output_dir"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "count").write_text(str(int((folder / "count").read_text()) + 1) if (folder / "count").exists() else "1")
if (folder.parent / "hang").exists():
    time.sleep(600)
if "warm.yaml" in sys.argv:
    if "model/b" in sys.argv:
        sys.exit("error: no such model")
    (folder / "config.yaml").write_text("run: {{steps: 2}}")
    (folder / "summary.json").write_text(json.dumps({{"step": 2}}))
    sys.exit()
size, seed, gcpo = int(settings["rollout.group_size"]), int(settings["run.seed"]), "method/gcpo" in sys.argv
if size == 16 and gcpo and seed == 1:
    print("error: out of memory, lower rollout.group_size")
    sys.exit(3)
(folder / "config.yaml").write_text("run: {{steps: 2}}")
after = {{"pass@1": 0.5 + 0.1 * gcpo + 0.05 * seed, "distinct@8": 1.0 + gcpo * {{4: 2, 8: 3, 16: 4}}[size]}}
(folder / "summary.json").write_text(json.dumps({{"step": 2, "after": after}}))
"""


@pytest.fixture(autouse=True)
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trainer"
    path.write_text(TRAINER)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(jobs, "TRAIN", (str(path), "train"))


def write(folder: Path, **changes) -> Path:
    values = {
        "name": "size",
        "recipe": "r.yaml",
        "grid": {"method": ["gcpo", "grpo"], "rollout.group_size": [4, 8, 16]},
        "seeds": [0, 1],
        "metrics": ["pass@1", "distinct@8"],
        "baseline": {"method": "grpo"},
        "trend": {"field": "rollout.group_size"},
        "at_once": 3,
        **changes,
    }
    path = folder / "ablation.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_every_cell_once_failures_apart_and_resumed(tmp_path: Path) -> None:
    ablation, root = load_ablation(write(tmp_path)), tmp_path / "out"
    wanted, said = cell_jobs(ablation, root), []
    failures = run_here(wanted, 3, said.append)
    assert sum("finished" in line for line in said) == 11
    assert [failure.job.name for failure in failures] == ["method=gcpo,group_size=16 seed 1"]
    assert "exit code 3: error: out of memory" in failures[0].reason
    again = run_here(wanted, 3, said.append)
    assert len(again) == 1
    counts = sorted(path.read_text() for path in root.rglob("count"))
    assert counts == ["1"] * 11 + ["2"], "only what had failed ran again"
    assert [failure.job.name for failure in unfinished(wanted)] == ["method=gcpo,group_size=16 seed 1"]

    rows = summarize(ablation, root)
    assert len(rows) == 6
    gcpo8 = next(r for r in rows if r.values == {"method": "gcpo", "rollout.group_size": 8})
    assert gcpo8.means["pass@1"].mean == pytest.approx(0.625)
    assert gcpo8.differences["pass@1"].mean == pytest.approx(0.1)
    assert gcpo8.differences["pass@1"].high == pytest.approx(0.1), "the seeds' own spread cancels in pairs"
    assert not next(r for r in rows if r.values["method"] == "grpo").differences
    torn = next(r for r in rows if r.values == {"method": "gcpo", "rollout.group_size": 16})
    assert list(torn.by_seed) == [0]

    lines = fit_trends(ablation, rows)
    slopes = {(line.values["method"], line.metric): line.slope.mean for line in lines}
    assert slopes["gcpo", "distinct@8"] == pytest.approx(1.0), "one strategy more with every doubling"
    assert slopes["grpo", "distinct@8"] == pytest.approx(0.0)
    gaps = {(line.values["method"], line.metric): line.difference for line in lines}
    gap = gaps["gcpo", "distinct@8"]
    assert gap is not None
    assert gap.mean == pytest.approx(1.0)
    assert gaps["grpo", "distinct@8"] is None
    text = markdown(ablation, rows, lines, failures)
    assert "| gcpo | 8 | 2 | 0.625" in text
    assert "out of memory" in text
    assert "Slope per doubling" in text


def test_a_stop_ends_every_process_and_the_next_call_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "out"
    wanted = cell_jobs(load_ablation(write(tmp_path, grid={"method": ["gcpo", "grpo"]}, trend=None)), root)
    for job in wanted:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        (job.folder.parent / "hang").touch()
    killer = threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    killer.start()
    with pytest.raises(Stopped, match="SIGTERM"):
        run_here(wanted, 2, lambda _: None)
    assert len(list(root.rglob("count"))) == 2
    me = psutil.Process()
    assert not [child for child in me.children(recursive=True) if "trainer" in " ".join(child.cmdline())]
    for path in root.rglob("hang"):
        path.unlink()
    reasons = [failure.reason for failure in run_here(wanted, 2, lambda _: None)]
    assert all("KeyError" in reason for reason in reasons), "they went on: this trainer wants a group size"


def test_a_warm_start_that_fails_stops_only_those_that_need_it(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        grid={"model": ["a", "b"], "rollout.group_size": [4, 8]},
        baseline={},
        seeds=[0],
        warm_start="warm.yaml",
        warm_start_for="model",
    )
    ablation, root = load_ablation(path), tmp_path / "out"
    failures = run_here([*warm_starts(ablation, root), *cell_jobs(ablation, root)], 2, lambda _: None)
    assert "error: no such model" in failures[0].reason
    assert [f.job.name for f in failures[1:]] == [f"model=b,group_size={size} seed 0" for size in (4, 8)]
    assert all("its warm start" in f.reason for f in failures[1:])
    assert len(summarize(ablation, root)) == 2


def test_command_summarizes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, root = write(tmp_path), tmp_path / "out" / "size"
    assert ablate.main([str(path), "--output", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "12 runs, 0 of them finished" in printed
    assert "not finished: method=gcpo,group_size=16 seed 1: exit code 3: error: out of memory" in printed
    assert ablate.main([str(path), "--summarize", "--output", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "12 runs, 11 of them finished" in printed
    assert "not finished: method=gcpo,group_size=16 seed 1: failed: error: out of memory" in printed
    assert "slope per doubling of rollout.group_size" in printed
    written = {p.name for p in root.iterdir() if p.is_file()}
    assert {"summary.md", "summary.json", "pass_at_1.png", "distinct_at_8.png"} <= written
    content = json.loads((root / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert len(content["rows"]) == 6


def test_other_seeds_and_overrides_make_it_small(tmp_path: Path) -> None:
    path = write(tmp_path, warm_start_set=["run.steps=9"])
    ablation = load_ablation(path, seeds=[7], set=["run.steps=2"], warm_start_set=["run.name=w"])
    assert len(cells(ablation)) == 6
    assert all(
        "run.steps=2" in job.overrides and "run.seed=7" in job.overrides for job in cell_jobs(ablation, tmp_path)
    )
    assert ablation.warm_start_set == ("run.steps=9", "run.name=w")
    for override, field in (("rollout.group_size=2", "rollout.group_size"), ("method/dapo", "method")):
        with pytest.raises(ValueError, match=f"would undo what grid.{field} varies"):
            load_ablation(path, set=[override])


def test_a_folder_with_a_run_of_other_settings_is_refused(tmp_path: Path) -> None:
    recipe = "configs/recipe/quickstart.yaml"
    small = load_ablation(write(tmp_path, recipe=recipe), set=["run.steps=6"])
    for job in cell_jobs(small, tmp_path):
        job.folder.mkdir(parents=True)
        config = load(recipe, job.overrides)
        (job.folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    check_settings(cell_jobs(small, tmp_path))
    large = load_ablation(write(tmp_path, recipe=recipe))
    with pytest.raises(
        ValueError, match=r"seed0 holds a run with other settings \(run.steps is 6 there and 100 here\)"
    ):
        check_settings(cell_jobs(large, tmp_path))


def test_plots_show_intervals_and_trends_whatever_is_finished(tmp_path: Path) -> None:
    ablation, root = load_ablation(write(tmp_path)), tmp_path / "out"
    run_here([job for job in cell_jobs(ablation, root) if "seed 0" in job.name][:2], 2, lambda _: None)
    rows = summarize(ablation, root)
    assert [path.stat().st_size > 5000 for path in draw(ablation, rows, fit_trends(ablation, rows), root)] == [
        True,
        True,
    ]
    plain = ablation.model_copy(update={"trend": None})
    assert len(draw(plain, rows, [], root)) == 2


def test_commands_name_the_cell_its_fields_and_its_warm_start(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        grid={"method": ["gcpo"], "model": ["a", "b"]},
        baseline={},
        trend={"field": "model"},
        sizes={"a": 1, "b": 2},
        warm_start="w.yaml",
        warm_start_for="model",
        set=["run.steps=3"],
        warm_start_set=["run.steps=7"],
    )
    ablation, root = load_ablation(path), Path("out")
    starts = warm_starts(ablation, root)
    assert [job.command[2:] for job in starts] == [
        ["w.yaml", f"model/{v}", "run.steps=7", f"run.output_dir=out/warm_start/{v}"] for v in "ab"
    ]
    job = cell_jobs(ablation, root)[1]
    assert job.start == starts[1].folder
    assert job.command[2:7] == [
        "r.yaml",
        "method/gcpo",
        "model/b",
        "model.start_from=out/warm_start/b",
        "run.steps=3",
    ]
    assert "run.output_dir=out/method=gcpo,model=b/seed0" in job.command
    shared = load_ablation("configs/ablation/value.yaml")
    (start,) = warm_starts(shared, root)
    assert start.folder == Path("runs/quickstart_warm_start")
    assert {job.start for job in cell_jobs(shared, root)} == {start.folder}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": {"method": ["gcpo", "gcpo"]}}, "grid.method must list different values"),
        ({"baseline": {"method": "gpro"}}, "baseline.method is 'gpro'"),
        ({"trend": {"field": "method"}}, "needs numbers in grid"),
        ({"warm_start_for": "model"}, "warm_start_for must be a key of grid"),
        ({"seed": 3}, "seed is not a field; did you mean seeds?"),
        ({"seeds": [1, 1]}, "seeds must list different seeds"),
        ({"set": ["rollout.group_size=4"]}, "would undo what grid.rollout.group_size varies"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is compared below
        load_ablation(write(tmp_path, **changes))
    assert message in str(error.value)
    assert ": :" not in str(error.value)


def test_shipped_ablations_are_runs_the_trainer_accepts() -> None:
    for path in sorted(Path("configs/ablation").glob("*.yaml")):
        ablation = load_ablation(path)
        for cell in cells(ablation):
            if cell.seed == ablation.seeds[0]:
                load(ablation.recipe, cell.overrides(ablation, Path("runs/x")))


def test_the_walks_that_shipped_ablations_suggest_are_accepted() -> None:
    for path in sorted(Path("configs/ablation").glob("*.yaml")):
        lines = [line.removeprefix("#") for line in path.read_text().splitlines() if line.startswith("#")]
        text = "\n".join(lines).partition("python tools/ablate.py")[2].replace("\\\n", " ")
        arguments = ablate._parser().parse_args(shlex.split(text))
        assert arguments.files == [str(path)]
        ablation = load_ablation(
            path, seeds=arguments.seeds, set=arguments.set, warm_start_set=arguments.warm_start_set
        )
        root = Path(arguments.output)
        for job in [*warm_starts(ablation, root), *cell_jobs(ablation, root)[: len(ablation.grid) * 3]]:
            load(job.recipe, job.overrides)

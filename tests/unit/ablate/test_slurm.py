"""What is handed to Slurm, read from the scripts that a stand-in for sbatch receives; and submitit's own local executor."""

from __future__ import annotations

import json
import os
import pickle
import stat
import sys
from pathlib import Path

import pytest
import yaml

from megatron_gcpo.ablate import jobs
from megatron_gcpo.ablate.grid import load_ablation
from megatron_gcpo.ablate.jobs import Job, cell_jobs, unfinished
from megatron_gcpo.ablate.slurm import MARK, Queue, submit
from tools import ablate

RECIPE = "configs/recipe/quickstart.yaml"
SBATCH = """#!/bin/sh
n=$(cat "$FAKE/n" 2>/dev/null || echo 100); n=$((n + 1)); echo $n > "$FAKE/n"
cp "$1" "$FAKE/$n.sh"; echo "Submitted batch job $n"
"""
SACCT = """#!/bin/sh
echo "JobID|State|NodeList"
for n in $(seq 101 109); do for a in 0 1 2 3; do echo "${n}_$a|$(cat "$FAKE/state")|None"; done
echo "$n|$(cat "$FAKE/state")|None"; done
"""
TRAINER = f"""#!{sys.executable}
import json, pathlib, sys
settings = dict(s.split("=", 1) for s in sys.argv[2:] if "=" in s)
folder = pathlib.Path(settings["run.output_dir"])
if "method/grpo" in sys.argv:
    sys.exit("error: this one fails")
(folder / "config.yaml").write_text("run: {{steps: 2}}")
(folder / "summary.json").write_text(json.dumps({{"step": 2, "after": {{"pass@1": 0.5}}}}))
"""


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands; ``state`` is what sacct says of every job."""
    folder = tmp_path / "slurm_commands"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("sacct", SACCT), ("srun", "#!/bin/sh\n")):
        executable(folder / name, text)
    (folder / "state").write_text("PENDING")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(folder))
    return folder


def queue(root: Path, **parameters) -> Queue:
    values = {"timeout_min": 90, "gpus_per_node": 8, "slurm_partition": "h100", **parameters}
    return Queue(name="size", root=root, cluster="slurm", at_once=1, parameters=values)


def job(root: Path, name: str, *overrides: str) -> Job:
    return Job(name=name, folder=root / name, recipe=RECIPE, overrides=overrides)


def flags(script: Path) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_cells_are_one_array_that_waits_for_the_warm_start(tmp_path: Path, cluster: Path) -> None:
    start = job(tmp_path, "warm")
    cells = [job(tmp_path, f"c{i}", f"run.seed={i}") for i in range(3)]
    submitted, queued = submit(queue(tmp_path), [start], cells)
    assert (submitted, queued) == ([start, *cells], [])
    first, second = flags(cluster / "101.sh"), flags(cluster / "102.sh")
    assert "array" not in first
    assert "dependency" not in first
    assert second["array"].startswith("0-2%")
    assert second["dependency"] == "afterany:101"
    assert (second["time"], second["partition"], second["gpus-per-node"]) == ("90", "h100", "8")
    assert (second["nodes"], second["ntasks-per-node"]) == ("1", "1")
    assert "srun" in (cluster / "102.sh").read_text().splitlines()[-1]
    assert [(cell.folder / MARK).read_text() for cell in cells] == ["102_0", "102_1", "102_2"]
    with (tmp_path / "slurm" / "102_1" / "102_1_submitted.pkl").open("rb") as file:
        assert pickle.load(file).function.command == cells[1].command


def test_what_is_in_the_queue_is_not_submitted_again_and_what_failed_is(tmp_path: Path, cluster: Path) -> None:
    start, cell = job(tmp_path, "warm"), job(tmp_path, "c")
    submit(queue(tmp_path), [start], [cell])
    late = job(tmp_path, "late")
    assert submit(queue(tmp_path), [start], [cell, late]) == ([late], [start, cell])
    assert flags(cluster / "103.sh")["dependency"] == "afterany:101", "also the late one waits for the start"
    (cluster / "state").write_text("FAILED")
    assert submit(queue(tmp_path), [start], [cell, late]) == ([start, cell, late], [])


def test_a_run_over_machines_has_a_task_for_each_rank(tmp_path: Path, cluster: Path) -> None:
    large = job(tmp_path, "large", "cluster.num_nodes=2", "cluster.processes_per_node=4", "cluster.platform=auto")
    submit(queue(tmp_path), [], [large, job(tmp_path, "small")])
    shapes = [(f["nodes"], f["ntasks-per-node"]) for f in (flags(cluster / f"{n}.sh") for n in (101, 102))]
    assert shapes == [("1", "1"), ("2", "4")]


def test_what_slurm_needs_is_said(tmp_path: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--slurm: .*slurm_partitoin"):
        submit(queue(tmp_path, slurm_partitoin="x"), [], [job(tmp_path, "c")])
    with pytest.raises(ValueError, match="needs timeout_min=MINUTES"):
        submit(Queue(name="x", root=tmp_path, cluster="slurm", at_once=1, parameters={}), [], [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="finds no srun"):
        submit(queue(tmp_path), [], [])


def test_submitit_really_runs_cells_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    executable(tmp_path / "trainer", TRAINER)
    monkeypatch.setattr(jobs, "TRAIN", (str(tmp_path / "trainer"), "train"))
    path = tmp_path / "ablation.yaml"
    grid = {"name": "size", "recipe": RECIPE, "grid": {"method": ["gcpo", "grpo"]}, "seeds": [0], "metrics": ["pass@1"]}
    path.write_text(yaml.safe_dump({**grid, "at_once": 2}))
    output = tmp_path / "out"
    arguments = [str(path), "--output", str(output), "--slurm", "timeout_min=1", "--cluster", "local"]
    assert ablate.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "2 runs were submitted" in printed
    assert "not finished: method=grpo seed 0: failed: error: this one fails" in printed
    cells = cell_jobs(load_ablation(path), output / "size")
    assert [failure.job for failure in unfinished(cells)] == [cells[1]]
    assert len(json.loads((output / "size" / "summary.json").read_text())["rows"]) == 1

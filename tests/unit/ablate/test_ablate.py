"""Grids, their execution with a trainer that only writes results, and what is made of the results."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
import yaml

from megatron_gcpo.ablate import execute
from megatron_gcpo.ablate.grid import cells, load_ablation
from megatron_gcpo.ablate.summarize import fit_trends, markdown, summarize
from megatron_gcpo.config import load
from tools import ablate

TRAINER = f"""#!{sys.executable}
import json, pathlib, sys
settings = dict(s.split("=", 1) for s in sys.argv[2:] if "=" in s)
folder = pathlib.Path(settings["run.output_dir"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "count").write_text(str(int((folder / "count").read_text()) + 1) if (folder / "count").exists() else "1")
size, seed, gcpo = int(settings["rollout.group_size"]), int(settings["run.seed"]), "method/gcpo" in sys.argv
if size == 16 and gcpo and seed == 1:
    print("error: out of memory, lower rollout.group_size")
    sys.exit(3)
(folder / "config.yaml").write_text("run: {{steps: 2}}")
after = {{"pass@1": 0.5 + 0.1 * gcpo + 0.05 * seed, "distinct@8": 1.0 + gcpo * {{4: 2, 8: 3, 16: 4}}[size]}}
(folder / "summary.json").write_text(json.dumps({{"step": 2, "after": after}}))
"""


@pytest.fixture
def trainer(tmp_path: Path) -> list[str]:
    path = tmp_path / "trainer"
    path.write_text(TRAINER)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return [str(path)]


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


def test_every_cell_once_failures_apart_and_resumed(tmp_path: Path, trainer: list[str]) -> None:
    ablation, root = load_ablation(write(tmp_path)), tmp_path / "out"
    said: list[str] = []
    failures = execute.run_here(ablation, cells(ablation), root, said.append, train=trainer)
    assert len(said) == 12
    assert [(f.cell.values["rollout.group_size"], f.cell.seed) for f in failures] == [(16, 1)]
    assert "exit code 3: error: out of memory" in failures[0].reason
    again = execute.run_here(ablation, cells(ablation), root, said.append, train=trainer)
    assert len(again) == 1
    counts = sorted(path.read_text() for path in root.rglob("count"))
    assert counts == ["1"] * 11 + ["2"], "only what had failed ran again"

    rows = summarize(ablation, root)
    assert len(rows) == 6
    gcpo8 = next(r for r in rows if r.values == {"method": "gcpo", "rollout.group_size": 8})
    assert gcpo8.means["pass@1"].mean == pytest.approx(0.625)
    assert gcpo8.differences["pass@1"].mean == pytest.approx(0.1)
    assert gcpo8.differences["pass@1"].high == pytest.approx(0.1), "the seeds' own spread cancels in pairs"
    assert not next(r for r in rows if r.values["method"] == "grpo").differences
    torn = next(r for r in rows if r.values == {"method": "gcpo", "rollout.group_size": 16})
    assert list(torn.by_seed) == [0]

    slopes = {(line.values["method"], line.metric): line.slope.mean for line in fit_trends(ablation, rows)}
    assert slopes["gcpo", "distinct@8"] == pytest.approx(1.0), "one strategy more with every doubling"
    assert slopes["grpo", "distinct@8"] == pytest.approx(0.0)
    text = markdown(ablation, rows, fit_trends(ablation, rows), failures)
    assert "| gcpo | 8 | 2 | 0.625" in text
    assert "out of memory" in text
    assert "Slope per doubling" in text


def test_command_summarizes_and_draws(
    tmp_path: Path, trainer: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "TRAIN", tuple(trainer))
    path = write(tmp_path)
    ablation = load_ablation(path)
    execute.run_here(ablation, cells(ablation), tmp_path / "out" / "size", lambda _: None, train=trainer)
    assert ablate.main([str(path), "--summarize", "--output", str(tmp_path / "out")]) == 0
    assert "12 runs, 11 of them finished" in capsys.readouterr().out
    written = {p.name for p in (tmp_path / "out" / "size").iterdir() if p.is_file()}
    assert {"summary.md", "summary.json", "pass_at_1.png", "distinct_at_8.png"} <= written
    assert len(json.loads((tmp_path / "out" / "size" / "summary.json").read_text())["rows"]) == 6


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
    )
    ablation, root = load_ablation(path), Path("out")
    starts = execute.warm_starts(ablation, root, train=["train"])
    assert starts == [["train", "w.yaml", f"model/{v}", f"run.output_dir=out/warm_start/{v}"] for v in "ab"]
    command = execute.command(ablation, cells(ablation)[1], root, train=["train"])
    assert command[:6] == [
        "train",
        "r.yaml",
        "method/gcpo",
        "model/b",
        "model.start_from=out/warm_start/b",
        "run.steps=3",
    ]
    assert "run.output_dir=out/method=gcpo,model=b/seed0" in command


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": {"method": ["gcpo", "gcpo"]}}, "grid.method must list different values"),
        ({"baseline": {"method": "gpro"}}, "baseline.method is 'gpro'"),
        ({"trend": {"field": "method"}}, "needs numbers in grid"),
        ({"warm_start_for": "model"}, "warm_start_for must be a key of grid"),
        ({"seed": 3}, "seed is not a field; did you mean seeds?"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is compared below
        load_ablation(write(tmp_path, **changes))
    assert message in str(error.value)


def test_shipped_ablations_are_runs_the_trainer_accepts() -> None:
    for path in sorted(Path("configs/ablation").glob("*.yaml")):
        ablation = load_ablation(path)
        for cell in cells(ablation):
            if cell.seed == ablation.seeds[0]:
                load(ablation.recipe, cell.overrides(ablation, Path("runs/x")))

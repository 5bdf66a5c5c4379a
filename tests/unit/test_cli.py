"""Bad input through the command line: one clear line, exit code 2, no traceback, and no process was started."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_gcpo import cli
from megatron_gcpo.cluster import launch
from megatron_gcpo.config import load
from megatron_gcpo.data import load_prompts, load_tokenizer
from megatron_gcpo.observe.summary import Summary
from megatron_gcpo.policy import manifest
from megatron_gcpo.policy.hf_config import complete_model, read_hf_config
from tests.dist.tiny import write_recipe

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "recipe" / "quickstart.yaml")


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that would have become processes."""
    calls: list[list[str]] = []
    monkeypatch.setattr(launch, "run", lambda cluster, argv, log_dir: calls.append(list(argv)) or 0)
    monkeypatch.delenv("RANK", raising=False)
    return calls


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


@pytest.fixture
def refused(started: list[list[str]], capsys: pytest.CaptureFixture[str]):
    """Runs the command and returns what it says instead of starting."""

    def refused(*arguments: Any, lines: int = 1) -> str:
        assert cli.main(["train", *map(str, arguments)]) == 2
        output = capsys.readouterr()
        assert started == []
        assert output.err.startswith("error: ")
        assert "Traceback" not in output.err
        assert len(output.err.splitlines()) == lines, output.err
        return output.err

    return refused


def test_a_sound_recipe_starts_its_ranks(recipe: Path, started: list[list[str]], tmp_path: Path) -> None:
    assert cli.main(["train", str(recipe), "run.steps=3"]) == 0
    assert started == [["train", str(recipe), "run.steps=3"]]
    assert (tmp_path / "run").is_dir()


def test_a_recipe_that_is_not_there(refused, recipe: Path) -> None:
    text = refused(recipe.with_name("recipy.yaml"))
    assert f"there is no recipe {recipe.with_name('recipy.yaml')}; did you mean {recipe}?" in text


CASES: list[tuple[list[str], list[str]]] = [
    (["rollout.temprature=1"], ["rollout.temprature is not a field", "rollout.temperature"]),
    (["train.optimizer.lrr=1"], ["train.optimizer.lrr is not an option of Megatron's OptimizerConfig"]),
    (["method.name=gcop"], ["method.name 'gcop' is unknown", "did you mean gcpo"]),
    (["method.cc=1"], ["method.cc is not a field"]),
    (["method.loss.clip_lo=1"], ["method.loss.clip_lo is not a field", "clip_low"]),
    (
        ["method.overlong={max_tokens: 20, buffer: 4}"],
        ["method.overlong penalizes answers above 16 tokens", "rollout.max_new_tokens 6"],
    ),
    (["verify.name=exat"], ["verify.name: there is no verifier 'exat'", "exact"]),
    (["verify.options={patern: x}"], ["verify.options", "'patern'", "pattern"]),
    (["data.template=chat"], ["data.template is chat, but the tokenizer has no chat template"]),
    (["rollout.prompts_per_step=26"], ["rollout.prompts_per_step 26 exceeds the 24 prompts of data.train"]),
    (["rollout.max_new_tokens=28"], ["28 may be generated", "32 positions", "rollout.max_new_tokens to 27"]),
    (["cluster.processes_per_node=3", "cluster.tensor_model_parallel_size=2"], ["start a multiple of 2 processes"]),
    (
        ["cluster.processes_per_node=4", "cluster.tensor_model_parallel_size=4"],
        ["cluster.tensor_model_parallel_size 4", "use"],
    ),
    (
        ["cluster.processes_per_node=4", "cluster.pipeline_model_parallel_size=4"],
        ["cluster.pipeline_model_parallel_size", "2 layers"],
    ),
    (["model.hf_config.model_type=qwen33"], ["model.hf_config.model_type 'qwen33'", "did you mean qwen3"]),
    (["model.tokenizer=./nowhere"], ["there is no tokenizer folder ./nowhere"]),
    (["model.start_from=runs/nowhere"], ["model.start_from: there is no complete checkpoint in runs/nowhere"]),
    (["run.resume=must"], ["run.resume is must", "holds no complete checkpoint", "set it to auto"]),
    (["run.stage=sft"], ["no demonstration for stage sft", "data.train.demonstration_column"]),
    (["observe.mlflow={}"], ["observe.mlflow needs the package mlflow"]),
]


@pytest.mark.parametrize(("overrides", "said"), CASES, ids=[" ".join(overrides) for overrides, _ in CASES])
def test_mistakes_are_found_before_anything_starts(
    refused, recipe: Path, overrides: list[str], said: list[str], tmp_path: Path
) -> None:
    text = refused(recipe, *overrides)
    for part in said:
        assert part in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "rows", "reason"),
    [
        ("data.train.prompt_column=promt", 24, "no column 'promt': set prompt_column to the nearest, 'prompt'"),
        ("data.heldout.answer_column=anser", 4, "no column 'anser': set answer_column to the nearest, 'answer'"),
        ("data.max_prompt_tokens=4", 24, "the prompt has 5 tokens, more than data.max_prompt_tokens 4"),
    ],
)
def test_bad_rows_are_listed_with_file_and_line(refused, recipe: Path, override: str, rows: int, reason: str) -> None:
    """The first five, how many more, and what to do."""
    text = refused(recipe, override, lines=1 + min(rows, 5) + (rows > 5) + 1)
    assert f"{rows} bad rows in jsonl" in text
    assert f".jsonl:1: {reason}" in text
    assert "data.on_bad_row: skip" in text


def test_a_data_file_that_is_not_there_names_the_nearest(refused, recipe: Path, tmp_path: Path) -> None:
    text = refused(recipe, f"data.train.path={tmp_path}/trian.jsonl")
    assert f"there is no file {tmp_path}/trian.jsonl; did you mean {tmp_path}/train.jsonl?" in text


def test_an_empty_data_set(refused, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n\n")
    assert "data.train: no usable prompt" in refused(recipe)


def test_a_row_that_is_no_json_has_its_line(refused, recipe: Path, tmp_path: Path) -> None:
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"id": "x", "prompt": \n')
    text = refused(recipe, lines=3)
    assert f"{tmp_path}/train.jsonl:25: not valid JSON" in text
    assert "data.on_bad_row: skip" in text


def test_a_demonstration_that_does_not_fit(refused, recipe: Path, tmp_path: Path) -> None:
    """Five tokens of prompt, the end of sequence, and a demonstration: 32 positions hold 26 of its tokens."""
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    sft = ("run.stage=sft", "train.sft_rows_per_step=4", "data.train.demonstration_column=shown", "run.resume=must")

    def write(words: int) -> None:
        shown = [{**row, "shown": "sky " * words} for row in rows]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))

    write(27)
    text = refused(recipe, *sft[:-1])
    assert "prompt 'train-0' and its demonstration have 33 tokens" in text
    assert "32 positions" in text
    write(26)
    assert cli.main(["train", str(recipe), *sft[:-1]]) == 0


def test_an_output_folder_that_cannot_be_made(refused, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = refused(recipe, f"run.output_dir={tmp_path}/file/run")
    assert f"run.output_dir {tmp_path}/file/run cannot be made (Not a directory): choose another" in text


def test_a_quick_start_without_its_warm_start_says_how_to_get_it(refused, tmp_path: Path) -> None:
    text = refused(QUICKSTART, f"model.start_from={tmp_path}/warm", f"run.output_dir={tmp_path}/run")
    assert f"model.start_from: there is no complete checkpoint in {tmp_path}/warm" in text


# ---- runs that exist already -------------------------------------------------------------------------------------


def leave_checkpoint(recipe: Path, folder: Path, step: int, **changed: Any) -> None:
    """What a run that was stopped at ``step`` leaves, as far as it is read before processes start."""
    config = load(recipe)
    tokenizer = load_tokenizer(config.model, config.data.train)
    model = json.loads(read_hf_config(complete_model(config.model, tokenizer)).to_json_string(use_diff=False)) | changed
    path = manifest.folder(folder, step)
    path.mkdir(parents=True)
    about = manifest.Manifest(
        format=manifest.FORMAT,
        step=step,
        versions={},
        layout={},
        dtype="fp32",
        model=model,
        model_hash=manifest._hash(model),
        files={},
    )
    (path / manifest.NAME).write_text(json.dumps(asdict(about)))
    prompts = load_prompts(config.data.train, config.data, tokenizer)
    manifest.write_extra(path, Summary(step=step, data=prompts.fingerprint()).to_json())


def test_a_stopped_run_goes_on(recipe: Path, started: list[list[str]], tmp_path: Path) -> None:
    leave_checkpoint(recipe, tmp_path / "run", 2)
    assert cli.main(["train", str(recipe), "run.resume=must"]) == 0
    assert len(started) == 1


def test_a_stopped_run_is_not_overwritten(refused, recipe: Path, tmp_path: Path) -> None:
    leave_checkpoint(recipe, tmp_path / "run", 2)
    text = refused(recipe, "run.resume=never")
    assert f"{tmp_path}/run already holds step_00000002, and run.resume is never: choose another run.output_dir" in text


def test_a_checkpoint_of_another_model_names_what_differs(refused, recipe: Path, tmp_path: Path) -> None:
    leave_checkpoint(recipe, tmp_path / "run", 2, hidden_size=64)
    text = refused(recipe)
    assert "is of another model: hidden_size is 64 there and 32 here" in text
    assert "choose another run directory" in text


def test_other_prompts_than_before_are_refused(refused, recipe: Path, tmp_path: Path) -> None:
    leave_checkpoint(recipe, tmp_path / "run", 2)
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(reversed(lines)))
    assert "was trained on other prompts than data.train gives now" in refused(recipe)


def test_fewer_steps_than_were_done_are_refused(refused, recipe: Path, tmp_path: Path) -> None:
    leave_checkpoint(recipe, tmp_path / "run", 5)
    assert "has done 5 steps already, more than run.steps 4: raise it" in refused(recipe)


def test_a_finished_run_is_shown_and_not_repeated(
    recipe: Path, started: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    Summary(step=4, after={"pass@1": 0.625}).write(tmp_path / "run")
    assert cli.main(["train", str(recipe)]) == 0
    assert started == []
    output = capsys.readouterr().out
    assert "0.625" in output
    assert f"{tmp_path}/run is finished" in output
    assert cli.main(["train", str(recipe), "run.steps=5"]) == 0
    assert len(started) == 1


def test_run_folders_take_the_name_and_the_seed(recipe: Path) -> None:
    config = load(recipe, ["run.output_dir=out/{name}-{seed}", "run.seed=3"])
    assert cli.run_folder(config) == Path("out/tiny-3")


def test_what_follows_the_recipe_may_be_pieces(started: list[list[str]], tmp_path: Path) -> None:
    arguments = [QUICKSTART, "method/grpo", "model.start_from=null", f"run.output_dir={tmp_path}/run"]
    assert cli.main(["train", *arguments]) == 0
    assert started == [["train", *arguments]]


def test_the_tiny_recipe_is_what_the_test_says(recipe: Path) -> None:
    assert yaml.safe_load(recipe.read_text())["run"]["steps"] == 4

"""``megatron-gcpo eval`` on a small Hugging Face folder whose greedy answers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from megatron_gcpo.cli import main
from megatron_gcpo.data.tasks import make_task
from megatron_gcpo.data.tokenizer import build_task_tokenizer
from megatron_gcpo.evaluate.suite import load_suite
from tests.unit.evaluate.random_model import save_random_model

PROMPTS = [f"what is {a} {b} + {b} {a} ?" for a, b in ((1, 2), (3, 4), (5, 6), (7, 8))]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A random model with the addition task's tokenizer, and what it greedily says to each prompt in six tokens."""
    folder = tmp_path_factory.mktemp("hf")
    tokenizer = build_task_tokenizer(make_task("addition", {}))
    tokenizer.save_pretrained(folder)
    model = save_random_model(folder, tokenizer, 64)
    said = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        out = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        said.append(tokenizer.decode(out, skip_special_tokens=True))
    return folder, said


def write_suite(folder: Path, rows: list[dict], **more) -> Path:
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = {
        "template": "plain",
        "max_new_tokens": 6,
        "samples": 4,
        "ks": [1, 4],
        "top_k": 1,
        "dtype": "fp32",
        "embed": None,
        "benchmarks": [
            {
                "name": "echo",
                "source": {"kind": "jsonl", "path": str(folder / "problems.jsonl"), "id_column": "id"},
                "verify": {
                    "name": "exact",
                    "options": {"pattern": "(.+)"},
                    "isolation": "best_effort",
                    "num_workers": 1,
                },
            }
        ],
        **more,
    }
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(suite))
    return path


def test_metrics_of_a_greedy_model_are_its_known_answers(
    subject: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder, said = subject
    answers = [*said[:3], "something else"]
    rows = [{"id": f"q{i}", "prompt": p, "answer": a} for i, (p, a) in enumerate(zip(PROMPTS, answers, strict=True))]
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": PROMPTS[1], "answer": "x"}) + "\n")
    suite = write_suite(tmp_path, rows, trained_on={"kind": "jsonl", "path": str(tmp_path / "train.jsonl")})
    assert main(["eval", str(folder), "--suite", str(suite), "--output", str(tmp_path / "out.json")]) == 0

    (result,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert [problem["correct"] for problem in result["problems"]] == [1.0, 1.0, 1.0, 0.0]
    metrics = result["metrics"]
    for name in ("avg@4", "pass@4", "maj@4"):
        assert metrics[name]["mean"] == 0.75
        assert metrics[name]["low"] < 0.75 < metrics[name]["high"]
    assert [overlap["prompt_id"] for overlap in result["overlaps"]] == ["q1"]
    printed = capsys.readouterr().out
    assert "0.750 [" in printed
    assert "echo q1: 100 %" in printed


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [{"id": "a", "prompt": "what", "answer": "x"}]
    for change, message in (
        ({"sample": 4}, "sample is not a field; did you mean samples?"),
        ({"ks": [1, 9]}, "ks [9] need as many samples"),
        ({"benchmarks": []}, "benchmarks"),
        ({"benchmarks": [{"name": "b", "source": {"kind": "jsonl", "path": "p"}}]}, "no verify section"),
        (
            {"benchmarks": [{"name": "b", "source": {"kind": "jsonl", "pth": "p"}}]},
            "benchmarks.0.source.pth is not a field",
        ),
    ):
        suite = write_suite(tmp_path, rows, **change)
        assert main(["eval", str(tmp_path), "--suite", str(suite)]) == 2
        assert message in capsys.readouterr().err
    assert main(["eval", str(tmp_path), "--suite", str(tmp_path / "no.yaml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_shipped_suites_are_sound_and_imply_their_verifiers() -> None:
    for path in sorted(Path("configs/suite").glob("*.yaml")):
        assert load_suite(path).benchmarks
    names = {b.name: b.verifier.name for b in load_suite("configs/suite/math.yaml").benchmarks}
    assert names["gsm8k"] == "math"
    assert names["gpqa"] == "choice"


def test_problems_of_every_benchmark_are_found_before_the_first_token(
    subject: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """In the suite's own terms: a benchmark that does not fit behind one that does, torn rows, no training prompts."""
    folder, _ = subject
    rows = [{"id": "a", "prompt": PROMPTS[0], "answer": "x"}]
    (tmp_path / "torn.jsonl").write_text('{"prompt": "what is')
    sound = yaml.safe_load(write_suite(tmp_path, rows).read_text())["benchmarks"][0]
    torn = {**sound, "name": "torn", "source": {"kind": "jsonl", "path": str(tmp_path / "torn.jsonl")}}
    for change, message in (
        (
            {"benchmarks": [sound, {**sound, "name": "long", "max_new_tokens": 60}]},
            "error: benchmark 'long': prompt 'a' has 8 tokens and with its answers up to 68, but the model holds 64 "
            "positions: lower max_new_tokens from 60",
        ),
        ({"benchmarks": [sound, torn]}, "error: benchmark 'torn': 1 bad row in jsonl"),
        ({"benchmarks": [sound, torn]}, "or set on_bad_row: skip."),
        ({"trained_on": {"kind": "jsonl", "path": str(tmp_path / "no.jsonl")}}, "error: trained_on: there is no file"),
        ({"template": "chat"}, "error: benchmark 'echo': template is chat, but the tokenizer has no chat template"),
    ):
        assert main(["eval", str(folder), "--suite", str(write_suite(tmp_path, rows, **change))]) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        assert "echo: 1 problems" not in printed.out


def test_a_check_that_found_no_overlap_is_told_from_no_check(
    subject: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder, _ = subject
    rows = [{"id": "a", "prompt": PROMPTS[0], "answer": "x"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": PROMPTS[1], "answer": "x"}) + "\n")
    trained_on = {"kind": "jsonl", "path": str(tmp_path / "train.jsonl")}
    for more, shown, saved in (({}, False, None), ({"trained_on": trained_on}, True, [])):
        suite = write_suite(tmp_path, rows, samples=1, ks=[1], **more)
        assert main(["eval", str(folder), "--suite", str(suite), "--output", str(tmp_path / "out.json")]) == 0
        assert ("problems that overlap with training" in capsys.readouterr().out) == shown
        content = json.loads((tmp_path / "out.json").read_text(), parse_constant=lambda name: pytest.fail(name))
        assert content["benchmarks"][0]["overlaps"] == saved
        assert content["benchmarks"][0]["metrics"]["avg@1"]["low"] is None, "one problem says nothing of the spread"

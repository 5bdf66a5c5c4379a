"""Evaluations of whole conversations: the last answer counts, and what the critic changed is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoTokenizer

from megatron_gcpo.cli import main
from megatron_gcpo.data.tasks import make_task
from megatron_gcpo.data.tokenizer import build_task_tokenizer
from megatron_gcpo.environments import CRITIC, ENVIRONMENTS
from megatron_gcpo.evaluate import measure, summarize_evals
from megatron_gcpo.evaluate.suite import EnvironmentName
from megatron_gcpo.seeds import derive_seed
from megatron_gcpo.types import Group, Prompt, Rollout, Verdicts
from tests.unit.evaluate.random_model import save_random_model

NEW_TOKENS = 4
PROMPTS = [f"what is {a} {b} + {b} {a} ?" for a, b in ((1, 2), (3, 4), (5, 6), (7, 8))]


def conversation(first: int, between: int, last: int, text: str) -> Rollout:
    count = first + between + last
    return Rollout(
        token_ids=np.arange(count),
        logprobs=np.zeros(count, np.float32),
        text=text,
        finish_reason="stop",
        versions_T=np.zeros(count, np.int32),
        trained_T=np.array([True] * first + [False] * between + [True] * last),
        turns=("?", text),
    )


def test_the_last_turn_counts_and_the_users_tokens_do_not():
    prompt = Prompt(id="a", token_ids=(1,), text="?", answer="x")
    group = Group(prompt=prompt, rollouts=(conversation(2, 9, 3, "x"), conversation(1, 9, 4, "y")))
    verdict = Verdicts(
        rewards_G=np.array([1.0, 0.05], np.float32),
        statuses_G=("ok", "ok"),
        turn_rewards_GK=np.array([[0.0, 1.0], [1.0, 0.05]], np.float32),
    )
    (record,) = measure([group], [verdict])
    assert record.correct_n == (True, False)
    assert record.turns_nK == ((False, True), (True, False))
    assert record.mean_tokens == 5.0
    metrics = summarize_evals([record], (1, 2))
    assert {name: metrics[name] for name in ("avg", "pass@2", "first_turn", "repaired", "broken", "held", "lost")} == {
        "avg": 0.5,
        "pass@2": 1.0,
        "first_turn": 0.5,
        "repaired": 0.5,
        "broken": 0.5,
        "held": 0.0,
        "lost": 0.0,
    }


def test_suites_know_every_environment():
    assert set(get_args(EnvironmentName.__value__)) == {"none", *ENVIRONMENTS}


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A random model whose tokenizer has one token for all words it does not know, a critic's among them."""
    folder = tmp_path_factory.mktemp("hf")
    build_task_tokenizer(make_task("addition", {})).save_pretrained(folder)
    backend = json.loads((folder / "tokenizer.json").read_text())
    backend["model"]["vocab"]["[UNK]"] = len(backend["model"]["vocab"])
    backend["model"]["unk_token"] = "[UNK]"
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = save_random_model(folder, tokenizer, 320)
    return folder, model, tokenizer


def greedy(model: Any, tokenizer: Any, ids: list[int]) -> list[int]:
    out = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return out[0, len(ids) :].tolist()


def said(model: Any, tokenizer: Any, prompt: str, prompt_id: str, benchmark: str) -> tuple[str, str]:
    """Both answers of a greedy policy, by the Hugging Face model alone."""
    first = greedy(model, tokenizer, context := tokenizer(prompt)["input_ids"])
    seed = derive_seed(0, f"evaluate/{benchmark}.turn1.user", 0, prompt_id)
    reply = CRITIC.reply(Prompt(id=prompt_id, token_ids=(), text=prompt, answer=""), (), seed)
    frame = tokenizer(f"\n{reply}\n", add_special_tokens=False)["input_ids"]
    last = greedy(model, tokenizer, [*context, *first, *frame])
    return tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in (first, last))


def test_a_suite_evaluates_whole_conversations(subject: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """By construction: repaired, held or broken, broken or lost, lost. The same problems alone tell the first turn."""
    folder, model, tokenizer = subject
    answers = [said(model, tokenizer, prompt, f"q{i}", "talk") for i, prompt in enumerate(PROMPTS)]
    assert any(first != last for first, last in answers), "the critic must change something"
    wanted = [answers[0][1], answers[1][0], answers[2][1], "something else"]
    rows = [{"id": f"q{i}", "prompt": p, "answer": w} for i, (p, w) in enumerate(zip(PROMPTS, wanted, strict=True))]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    benchmark = {
        "source": {"kind": "jsonl", "path": str(tmp_path / "problems.jsonl"), "id_column": "id"},
        "verify": {
            "name": "exact",
            "options": {"pattern": "(.+)"},
            "isolation": "best_effort",
            "num_workers": 1,
        },
    }
    suite = {
        "template": "plain",
        "max_new_tokens": NEW_TOKENS,
        "max_prompt_tokens": 32,
        "samples": 2,
        "ks": [1],
        "top_k": 1,
        "dtype": "fp32",
        "embed": None,
        "environment": "critic",
        "benchmarks": [{"name": "talk", **benchmark}, {"name": "alone", "environment": "none", **benchmark}],
    }
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    arguments = ["eval", str(folder), "--suite", str(tmp_path / "suite.yaml"), "--output", str(tmp_path / "out.json")]
    assert main(arguments) == 0

    talk, alone = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    right = [(first == want, last == want) for (first, last), want in zip(answers, wanted, strict=True)]
    means = {name: interval["mean"] for name, interval in talk["metrics"].items()}
    assert means["avg@2"] == np.mean([last for _, last in right])
    assert means["first_turn"] == np.mean([first for first, _ in right])
    assert means["repaired"] == np.mean([last and not first for first, last in right])
    assert means["broken"] == np.mean([first and not last for first, last in right])
    assert means["held"] + means["lost"] == pytest.approx(1 - means["repaired"] - means["broken"])
    assert [problem["correct"] for problem in talk["problems"]] == [float(last) for _, last in right]
    assert alone["metrics"]["avg@2"]["mean"] == means["first_turn"]
    assert "first_turn" not in alone["metrics"]

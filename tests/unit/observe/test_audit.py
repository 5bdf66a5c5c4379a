"""Planted faults are found, sound runs are left alone, and a verifier that declares nothing is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megatron_gcpo.observe import audit
from megatron_gcpo.observe.history import History
from megatron_gcpo.observe.replay import SavedGroup
from megatron_gcpo.observe.rollouts import SCHEMA
from megatron_gcpo.observe.summary import Summary
from megatron_gcpo.verify import table
from tools import audit_rewards

LIMITS = audit.Limits(min_problems=3)
PROBLEMS = [audit.Problem(id=f"p{i}", text=f"what is {i} ?", answer=str(i % 7)) for i in range(14)]


def group(problem: str, rewards, lengths, texts=None) -> SavedGroup:
    size = len(rewards)
    return SavedGroup(
        step=0,
        prompt_id=problem,
        prompt="?",
        texts=tuple(texts or [f"{problem} {i}" for i in range(size)]),
        rewards_G=np.array(rewards, dtype=np.float64),
        lengths_G=np.array(lengths),
        logprobs_G=np.zeros(size),
        advantages_G=np.zeros(size),
    )


def history(rewards, heldout) -> History:
    rows = [{"step": i, "reward/mean": r} for i, r in enumerate(rewards)]
    rows += [{"step": i * (len(rewards) - 1), "eval/pass@1": h} for i, h in enumerate(heldout)]
    return History(
        folder=Path("x"), config={}, metrics=tuple(rows), summary=None, rollout_files=(), modified=0, skipped=()
    )


@pytest.mark.parametrize(
    ("rewards", "heldout", "growth", "flagged"),
    [([0.2, 0.9], [0.2, 0.8], 0.1, False), ([0.2, 0.9], [0.3, 0.3], 0.7, True), ([0.9, 0.9], [0.5, 0.9], -0.4, False)],
)
def test_gap(rewards, heldout, growth, flagged):
    finding = audit.gap(history(rewards, heldout), audit.Limits(gap_growth=0.15))
    assert finding.value == pytest.approx(growth)
    assert finding.flagged is flagged
    assert audit.gap(history(rewards, heldout[:1]), LIMITS).value is None
    begun = replace(history(rewards, heldout[1:]), summary=Summary(before={"pass@1": heldout[0]}))
    assert audit.gap(begun, LIMITS).value == pytest.approx(growth)


def test_length_is_compared_within_groups_only():
    """Hard problems with long wrong answers correlate across groups and say nothing; in a group they do."""
    across = [group("a", [1, 1], [5, 5]), group("b", [0, 0], [50, 50])]
    assert audit.length_correlation(across, LIMITS).value is None
    padded = audit.length_correlation([group("a", [1, 0], [50, 5]), group("b", [0, 1, 1], [5, 50, 50])], LIMITS)
    assert padded.value == pytest.approx(1, abs=0.05)
    assert padded.flagged
    none = audit.length_correlation([group("a", [1, 0, 1, 0], [5, 5, 9, 9])], LIMITS)
    assert (none.value, none.flagged) == (0, False)


def judged_by(rule) -> audit.Judge:
    by_id = {problem.id: problem for problem in PROBLEMS}
    return lambda wanted: [np.array([float(rule(by_id[name], text)) for text in texts]) for name, texts in wanted]


def test_a_form_without_an_answer_must_not_be_paid():
    sound = audit.format_only(PROBLEMS, judged_by(lambda p, text: p.answer in text))
    assert (sound.value, sound.flagged) == (0, False)
    hacked = audit.format_only(PROBLEMS, judged_by(lambda p, text: 0.1 * ("<answer>" in text)))
    assert (hacked.value, hacked.flagged) == (1, True)
    assert "<answer>" in hacked.detail


def test_one_answer_for_everything():
    groups = [group(p.id, [1, 0], [3, 3], [f"\\boxed{{{p.answer}}}", "it is blue"]) for p in PROBLEMS]
    rule = judged_by(lambda p, text: p.answer in text)
    sound = audit.constant_output(groups, PROBLEMS, rule, LIMITS)
    assert sound.value == pytest.approx(1 / 7)
    assert not sound.flagged
    blind = judged_by(lambda p, text: "blue" in text)
    paid = [replace(g, rewards_G=np.array([0.0, 1.0])) for g in groups]
    hacked = audit.constant_output(paid, PROBLEMS, blind, LIMITS)
    assert (hacked.value, hacked.flagged) == (1, True)
    assert "it is blue" in hacked.detail
    assert audit.constant_output(paid, PROBLEMS[:2], blind, LIMITS).value is None


def test_overlap():
    assert not audit.overlap(PROBLEMS[:7], PROBLEMS[7:]).flagged
    planted = audit.overlap(PROBLEMS[:8], PROBLEMS[7:])
    assert planted.flagged
    assert planted.value == pytest.approx(1 / 7)
    assert audit.overlap(PROBLEMS, []).value is None


def test_every_verifier_declares_its_reward():
    for name, row in table.VERIFIERS.items():
        assert row.label is not None, f"{name}: what kind of reward is it?"
        assert 0 <= row.label.low < row.label.high <= 1
        assert row.label.exploits


def test_a_verifier_that_declares_nothing_is_refused(monkeypatch):
    monkeypatch.setitem(table.VERIFIERS, "exact", replace(table.VERIFIERS["exact"], label=None))
    with pytest.raises(ValueError, match="declares nothing of its reward"):
        audit_rewards.label_of("exact")


def write_run(folder: Path, answers: list[str], texts: list[str]) -> Path:
    """A run on problems with these answers, in which every rollout said the same of each."""
    run = folder / "run"
    (run / "rollouts").mkdir(parents=True)
    rows = [{"id": f"p{i}", "prompt": f"problem number {i}", "answer": a} for i, a in enumerate(answers)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text(json.dumps({**rows[0], "id": "h0"}) + "\n")
    parts = {
        part: {"kind": "jsonl", "path": str(folder / f"{part}.jsonl"), "id_column": "id"}
        for part in ("train", "heldout")
    }
    (run / "config.yaml").write_text(yaml.safe_dump({"data": parts, "verify": {"name": "exact", "num_workers": 1}}))
    saved = [
        {"step": 0, "prompt_id": f"p{i}", "sample": j, "prompt": "?", "text": text, "token_ids": [1] * (j + 1)}
        | {"logprobs": [0.0] * (j + 1), "reward": float(answer in text), "advantage": 0.0}
        for i, answer in enumerate(answers)
        for j, text in enumerate(texts)
    ]
    pq.write_table(pa.Table.from_pylist(saved, schema=SCHEMA), run / "rollouts/step_000000_replica_000.parquet")
    return run


def test_command_judges_with_the_runs_own_verifier(tmp_path, capsys):
    run = write_run(tmp_path, ["7"] * 9 + ["3"], ["answer: 3", "answer: 7"])
    assert audit_rewards.main([str(run)]) == 1
    findings = {f["name"]: f for f in json.loads((run / "audit.json").read_text())["findings"]}
    assert findings["one answer for everything"]["value"] == pytest.approx(0.9)
    flagged = {name for name, finding in findings.items() if finding["flagged"]}
    assert flagged == {"one answer for everything", "held-out problems in training", "reward follows length"}
    assert findings["format without answer"]["value"] == 0
    assert "known exploit" in capsys.readouterr().out


def test_command_says_what_is_missing(tmp_path, capsys):
    assert audit_rewards.main([str(tmp_path / "nowhere")]) == 2
    assert "there is no run folder" in capsys.readouterr().err

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from megatron_gcpo.config.records import SourceConfig
from megatron_gcpo.evaluate import evaluation_table, measure, per_prompt, summarize_evals, task_labeller
from megatron_gcpo.types import Group, Prompt, Rollout, Verdicts

# per prompt, what its samples say; "x" is wrong, "u" is correct by a strategy that is not recognised
ANSWERS = {"p": "aabx", "q": "xxxx", "r": "cuax", "s": "xxbx"}
PROMPTS = [Prompt(id=name, token_ids=(n,), text="", answer="") for n, name in enumerate(ANSWERS)]


def groups():
    """Sample s of a prompt says character s of its answers, with a token more for each sample."""
    return [
        Group(
            prompt=prompt,
            rollouts=tuple(
                Rollout(
                    token_ids=np.zeros(n + 1, np.int64),
                    logprobs=np.zeros(n + 1, np.float32),
                    text=letter,
                    finish_reason="length" if n == 3 else "stop",
                    versions_T=np.ones(n + 1, np.int32),
                )
                for n, letter in enumerate(ANSWERS[prompt.id])
            ),
        )
        for prompt in PROMPTS
    ]


def verdicts():
    """Everything but "x" is correct; "x" still earns a little for its form."""
    return [
        Verdicts(rewards_G=np.array([0.05 if a == "x" else 1.0 for a in said], np.float32), statuses_G=("ok",) * 4)
        for said in ANSWERS.values()
    ]


class AxisEncoder:
    """One axis per letter."""

    def encode(self, texts):
        self.texts = list(texts)
        return torch.eye(128)[[ord(text[0]) for text in texts]]


def records(**changes):
    return measure(groups(), verdicts(), **{"labeller": label, **changes})


def label(text):
    return None if text[0] == "u" else f"{text[0]}-way"


def test_metrics_of_a_scripted_policy():
    encoder = AxisEncoder()
    metrics = summarize_evals(records(encoder=encoder), (1, 4))
    assert metrics["prompts"] == 4
    assert metrics["avg"] == pytest.approx((3 + 0 + 3 + 1) / 16)
    assert metrics["pass@1"] == metrics["avg"]
    assert metrics["pass@4"] == pytest.approx(3 / 4)
    assert metrics["maj@4"] == pytest.approx(
        (1 + 0 + 1 + 1) / 4
    )  # no sample says an answer, so that wrong ones do not vote
    assert metrics["mean_tokens"] == 2.5
    assert metrics["truncated"] == 0.25
    assert metrics["distinct@4"] == pytest.approx((2 + 0 + 2 + 1) / 4)  # "u" is no strategy
    assert metrics["distinct@1"] == pytest.approx((3 + 0 + 2 + 1) / 16)
    # of all 16 samples: a 3, b 2, c 1, u 1, and the wrong ones, whose strategy is x
    shares = np.array([3, 2, 1, 1, 9]) / 16
    assert metrics["effective_strategies"] == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
    shares = np.array([3, 2, 1, 1]) / 7
    assert metrics["effective_strategies_correct"] == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
    # p: two directions, weights 2 and 1; q: none; r: three; s: one
    assert metrics["vendi"] == pytest.approx(((2 / 3) ** (-2 / 3) * (1 / 3) ** (-1 / 3) + 3 + 1) / 3)
    assert sorted(t[0] for t in encoder.texts) == sorted("aabcua")  # only correct ones, only where there are two


def test_without_labeller_and_encoder_their_metrics_are_absent():
    metrics = summarize_evals(records(labeller=None), (1, 4))
    assert set(metrics) == {"prompts", "avg", "pass@1", "pass@4", "maj@4", "mean_tokens", "truncated"}


def test_shares_of_replicas_add_up_to_the_whole():
    whole = records(encoder=AxisEncoder())
    shuffled = [whole[n] for n in (2, 0, 3, 1)]
    assert summarize_evals(shuffled, (1, 4)) == pytest.approx(summarize_evals(whole, (1, 4)))


def test_means_over_prompts_are_the_summary():
    found = records(encoder=AxisEncoder())
    values, metrics = per_prompt(found, (1, 4)), summarize_evals(found, (1, 4))
    assert values["pass@1"] == [0.75, 0.0, 0.75, 0.25]
    assert {name: np.mean(column) for name, column in values.items()} == pytest.approx(
        {name: metrics[name] for name in values}
    )


def test_records_hold_no_text_and_tell_answers_apart():
    assert measure([], []) == []
    texts = ["so \\boxed{7}", "\\boxed{7.0}", "\\boxed{8}", "no idea"]
    (group, *_), (verdict, *_) = groups(), verdicts()
    spoken = replace(
        group, rollouts=tuple(replace(r, text=text) for r, text in zip(group.rollouts, texts, strict=True))
    )
    (record,) = measure([spoken], [verdict])
    assert not any(isinstance(value, torch.Tensor | np.ndarray) for value in vars(record).values())
    first, same, other, none = record.answers_n
    assert first is not None
    assert none is None
    assert other not in (first, same)
    assert "7" not in (first, same)


def test_a_k_above_the_samples_and_no_prompts_are_refused():
    with pytest.raises(ValueError, match=r"k = 5.*evaluate\.samples"):
        summarize_evals(records(), (5,))
    with pytest.raises(ValueError, match=r"data\.heldout"):
        summarize_evals([], (1,))


def test_only_packaged_tasks_know_strategies():
    assert task_labeller(SourceConfig(kind="jsonl", path="x")) is None
    label_of = task_labeller(SourceConfig(kind="task", name="addition"))
    assert label_of is not None
    assert label_of("mumble") is None


def table(columns):
    file = io.StringIO()
    Console(file=file, width=120).print(evaluation_table("demo", columns))
    return [line.split() for line in file.getvalue().splitlines()]


def test_table_shows_how_the_last_two_differ():
    now = {
        "prompts": 4.0,
        "avg": 0.5,
        "pass@1": 0.5,
        "maj@4": 0.75,
        "distinct@1": 0.5,
        "distinct@4": 1.25,
        "vendi": 1.5,
    }
    lines = table({"before": {"pass@1": 0.1}, "step 50": {**now, "pass@1": 0.625}, "step 75": now})
    rows = {line[0]: line[1:5] for line in lines if line and line[0][0].isalpha()}
    assert rows["pass@1"] == ["0.100", "0.625", "0.500", "-0.125"]
    assert rows["distinct@4"] == ["-", "1.250", "1.250", "+0.000"]
    assert list(rows) == ["demo", "before", "pass@1", "maj@4", "distinct@4", "vendi"]


def test_table_of_one_evaluation_and_of_different_metrics():
    assert ["pass@1", "0.500"] in [line[:2] for line in table({"now": {"pass@1": 0.5}})]
    assert not any("change" in line for line in table({"now": {"pass@1": 0.5}}))
    (row,) = [line for line in table({"a": {"pass@1": 0.5}, "b": {"vendi": 1.0}}) if line[:1] == ["vendi"]]
    assert row[1:4] == ["-", "1.000", "-"]

import io

import numpy as np
import pytest
import torch
from rich.console import Console

from megatron_gcpo.evaluate import evaluate, measure, report_table, summarize_evals
from megatron_gcpo.rollout import Sample, Sampling
from megatron_gcpo.seeds import derive_seed
from megatron_gcpo.types import Prompt, Verdicts

# per prompt, what its samples say; "x" is wrong, "u" is correct by a strategy that is not recognised
ANSWERS = {"p": "aabx", "q": "xxxx", "r": "cuax", "s": "xxbx"}
PROMPTS = [Prompt(id=name, token_ids=(n,), text="", answer="") for n, name in enumerate(ANSWERS)]


class ScriptedEngine:
    """Sample s of prompt p says character s of its answers; a token more for each sample."""

    policy_version = 1
    max_positions = 100

    def __init__(self):
        self.requests = []

    def generate(self, requests, sampling):
        self.requests += requests
        samples = []
        for n, request in enumerate(requests):
            letter = ANSWERS[PROMPTS[request.prompt_token_ids[0]].id][n % 4]
            token_ids = np.array([ord(letter)] * (n % 4 + 1))
            reason = "length" if n % 4 == 3 else "stop"
            samples.append(
                Sample(
                    token_ids=token_ids,
                    logprobs=np.zeros(len(token_ids), np.float32),
                    finish_reason=reason,
                    versions_T=np.full(len(token_ids), 1, np.int32),
                )
            )
        return samples


class Pool:
    """Everything but "x" is correct; "x" still earns a little for its form."""

    def score(self, groups):
        rewards = [[0.05 if "x" in r.text else 1.0 for r in group.rollouts] for group in groups]
        return [Verdicts(rewards_G=np.array(r, np.float32), statuses_G=("ok",) * len(r)) for r in rewards]


class AxisEncoder:
    """One axis per letter."""

    def encode(self, texts):
        self.texts = list(texts)
        return torch.eye(128)[[ord(text[0]) for text in texts]]


def run(engine=None, **changes):
    options = {"samples": 4, "max_new_tokens": 9, "ks": (1, 4), "run_seed": 3, "step": 2, "labeller": label} | changes
    return evaluate(
        engine or ScriptedEngine(),
        PROMPTS,
        pool=Pool(),
        decode=lambda ids: "".join(map(chr, ids)),
        sampling=Sampling(),
        **options,
    )


def label(prompt, text):
    return None if text[0] == "u" else f"{text[0]}-way"


def test_metrics_of_a_scripted_policy():
    encoder = AxisEncoder()
    metrics = run(encoder=encoder).metrics
    assert metrics["prompts"] == 4
    assert metrics["avg"] == pytest.approx((3 + 0 + 3 + 1) / 16)
    assert metrics["pass@1"] == metrics["avg"]
    assert metrics["pass@4"] == pytest.approx(3 / 4)
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
    metrics = run(labeller=None).metrics
    assert set(metrics) == {"prompts", "avg", "pass@1", "pass@4", "mean_tokens", "truncated"}


def test_seeds_are_of_the_evaluation_and_not_of_training():
    engine = ScriptedEngine()
    run(engine)
    assert engine.requests[5].seed == derive_seed(3, "evaluate", 2, "q", 1)
    assert len({request.seed for request in engine.requests}) == 16


def test_shares_of_replicas_add_up_to_the_whole():
    whole = run(encoder=AxisEncoder())
    shuffled = [whole.prompts[n] for n in (2, 0, 3, 1)]
    assert summarize_evals(shuffled, (1, 4)).metrics == pytest.approx(whole.metrics)


def test_records_hold_no_text():
    record = measure([], [])
    assert record == []
    for prompt_eval in run(encoder=AxisEncoder()).prompts:
        assert not any(isinstance(value, (torch.Tensor, np.ndarray)) for value in vars(prompt_eval).values())


@pytest.mark.parametrize(("changes", "message"), [({"ks": (5,)}, r"k = 5.*evaluate\.samples"), ({"ks": (0,)}, "k = 0")])
def test_impossible_k_is_refused_before_sampling(changes, message):
    engine = ScriptedEngine()
    with pytest.raises(ValueError, match=message):
        run(engine, **changes)
    assert engine.requests == []


def test_no_prompts_is_refused():
    with pytest.raises(ValueError, match=r"data\.heldout"):
        evaluate(
            ScriptedEngine(),
            [],
            pool=Pool(),
            decode=str,
            samples=4,
            max_new_tokens=1,
            sampling=Sampling(),
            ks=(1,),
            run_seed=0,
        )


def test_table_puts_reports_side_by_side():
    console = Console(file=io.StringIO(), width=80)
    console.print(report_table({"before": run(labeller=None), "after": run()}))
    lines = console.file.getvalue().splitlines()
    (row,) = [line for line in lines if "pass@4" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["pass@4", "0.75", "0.75"]
    (row,) = [line for line in lines if "distinct@4" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["distinct@4", "-", "1.25"]

"""Asking the policy about candidates, on one replica and on two that meet at a sum."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from megatron_gcpo.data.judged import JudgedSampler, JudgedSampling
from megatron_gcpo.judge import Judge, check_question
from megatron_gcpo.types import Group, Prompt, Rollout

PROMPTS = [Prompt(id=f"p{i}", token_ids=(1,), text=f"problem {i} ?", answer="") for i in range(12)]


def words(texts):
    return [tuple(hash(word) % 1000 for word in text.split()) for text in texts]


class Policy:
    """Forecasts i / 50 for problem i, nothing readable for every third, and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, step, questions):
        self.asked.append(list(questions))
        return [Group(prompt=q, rollouts=(self.answer(int(q.id[1:])),)) for q in questions]

    def answer(self, i):
        text = "no idea" if i % 3 == 0 else f"\\boxed{{{i / 50}}}"
        ids = np.array([i, i + 1])
        logprobs = np.array([-1.0, -2.0], np.float32)
        versions = np.zeros(2, np.int32)
        return Rollout(token_ids=ids, logprobs=logprobs, text=text, finish_reason="stop", versions_T=versions)


def made(num_replicas=1, replica=0, encode=words, **options) -> Judge:
    sizes = {"num_prompts": 12, "prompts_per_step": 2, "seed": 0, "num_replicas": num_replicas}
    sampler = JudgedSampler(JudgedSampling(candidates=3, **options), **sizes)
    return Judge(sampler, PROMPTS, ask=Policy(), encode=encode, replica=replica)


def paid(judge: Judge, step: int, rewards=(0.0, 1.0)):
    sampler = judge.sampler
    return sampler.update(sampler.tally({p: np.array(rewards) for p in sampler.select(step)}))


def expected_choice(judge: Judge, step: int) -> list[int]:
    value = {p: 0.125 if p % 3 == 0 else p / 50 for p in judge.sampler.candidates(step)}
    best = sorted(value, key=lambda p: (-value[p], judge.sampler.candidates(step).index(p)))[:2]
    return [p for p in judge.sampler.candidates(step) if p in best]


def test_the_best_by_forecast_are_taken():
    judge = made()
    for step in range(2):
        judge.choose(step, lambda values: values)
        assert list(judge.sampler.select(step)) == expected_choice(judge, step)
        paid(judge, step)


def test_questions_name_the_problem_and_the_last_outcomes():
    judge = made(recent=2)
    judge.choose(0, lambda values: values)
    first = judge.sampler.select(0)
    assert all("Variance" not in q.text for q in judge._ask.asked[0])
    assert [q.id for q in judge._ask.asked[0]] == [PROMPTS[p].id for p in judge.sampler.candidates(0)]
    paid(judge, 0)
    judge.choose(1, lambda values: values)
    for question in judge._ask.asked[1]:
        assert f"The problem to judge: problem {question.id[1:]} ?" in question.text
        assert all(f"Problem: problem {p} ?\nVariance: 0.2500" in question.text for p in first)
        assert question.token_ids == words([question.text])[0]


def test_rows_are_the_answers_whose_reward_is_known():
    """Forecasts of visited prompts, and unreadable ones; paid by reward - baseline, prompt untrained."""
    judge = made()
    judge.choose(0, lambda values: values)
    paid(judge, 0)
    judge.choose(1, lambda values: values)
    outcome = paid(judge, 1)
    candidates = judge.sampler.candidates(1)
    known = [p for p in candidates if p in judge.sampler.select(1) or p % 3 == 0]
    batch = judge.rows(1, outcome)
    assert batch.num_rows == len(known) < len(candidates)
    for n, prompt in enumerate(known):
        begin, end = batch.cu_seqlens_N1[n : n + 2].tolist()
        assert batch.tokens_T[end - 2 : end].tolist() == [prompt, prompt + 1]
        assert batch.mask_T[begin:end].tolist() == [0.0] * (end - begin - 2) + [1.0, 1.0]
        want = outcome.advantages_C[candidates.index(prompt)]
        assert batch.advantages_T[end - 2 : end].tolist() == pytest.approx([want, want])
    watched = judge.metrics(outcome)
    assert set(watched) == {"reward", "error", "forecast", "unreadable_share"}
    assert watched["unreadable_share"] == pytest.approx(sum(p % 3 == 0 for p in candidates) / 6)


def test_nothing_is_trained_with_coef_0():
    judge = made(coef=0.0)
    judge.choose(0, lambda values: values)
    assert judge.rows(0, paid(judge, 0)) is None


def test_replicas_choose_and_are_paid_as_one_would_be():
    """Each asks about its own candidates; only sums of numbers meet, and the rows of both are those of one."""
    one, barrier, box = made(), threading.Barrier(2), [None, None]
    pair = [made(num_replicas=2, replica=r) for r in range(2)]
    rows = [[], []]

    def work(replica):
        def total(values):
            box[replica] = values
            barrier.wait(10)
            summed = box[0] + box[1]
            barrier.wait(10)
            return summed

        for step in range(3):
            pair[replica].choose(step, total)
            rows[replica].append(pair[replica].rows(step, paid(pair[replica], step)))

    threads = [threading.Thread(target=work, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step in range(3):
        one.choose(step, lambda values: values)
        whole = one.rows(step, paid(one, step))
        parts = [rows[r][step] for r in range(2)]
        assert parts[0].num_rows + parts[1].num_rows == whole.num_rows
        own = sorted(whole.advantages_T[whole.mask_T > 0].tolist())
        assert sorted(a for p in parts for a in p.advantages_T[p.mask_T > 0].tolist()) == own
    assert pair[0].sampler.state() == pair[1].sampler.state() == one.sampler.state()
    for step, asked in enumerate(zip(*(judge._ask.asked for judge in pair), strict=True)):
        names = [q.id for questions in asked for q in questions]
        assert len(asked[0]) == len(asked[1]) == 3
        assert sorted(names) == sorted(PROMPTS[p].id for p in one.sampler.candidates(step))


def test_a_tokenizer_that_cannot_ask_is_refused():
    with pytest.raises(ValueError, match=r"question cannot be put: no such word; use a tokenizer of a language model"):
        made(encode=lambda texts: ["no such word"] * len(texts))
    with pytest.raises(
        ValueError, match=r"has 999 tokens without its problems, at most 320 .* lower method\.sampler\.recent"
    ):
        check_question(lambda texts: [(1,) * 999] * len(texts), 3)

"""What drawn tokens alone show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_gcpo.contract.facts import token_facts
from megatron_gcpo.rollout.engine import Sample, SampleRequest, Sampling

STOP, VOCABULARY = 1, 20


def facts(*samples: Sample, prompt: tuple[int, ...] = (2, 3), stops: tuple[int, ...] = (STOP,)) -> tuple[str, ...]:
    requests = [SampleRequest(prompt_token_ids=prompt, seed=0, max_new_tokens=4) for _ in samples]
    return token_facts(requests, samples, Sampling(stop_token_ids=stops), vocab_size=VOCABULARY)


def sample(*ids: int, finish: str = "stop", logprobs: Any = None) -> Sample:
    values = np.full(len(ids), -1.0, np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
    return Sample(
        token_ids=np.asarray(ids, np.int64),
        logprobs=values,
        finish_reason=finish,
        versions_T=np.ones(len(ids), np.int32),
    )


def test_sound_samples_show_nothing() -> None:
    assert facts(sample(5, 6, STOP), sample(5, 6, 7, 8, finish="length"), sample(5, 6, 7, STOP)) == ()


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (sample(5, VOCABULARY, STOP), "outside the vocabulary of 20"),
        (sample(-1, STOP), "outside the vocabulary of 20"),
        (sample(5, STOP, 6, STOP), "go on after one of the stop ids [1]"),
        (sample(5, 6, finish="stop"), "end on none of the stop ids [1]"),
        (sample(finish="stop"), "end on none of the stop ids [1]"),
        (sample(5, 6, finish="length"), "have another one"),
        (sample(5, 6, 7, STOP, finish="length"), "end on a stop id"),
        (sample(5, STOP, logprobs=[-1.0]), "another number of log-probs"),
        (sample(5, STOP, logprobs=[-1.0, np.nan]), "no numbers"),
        (sample(5, STOP, logprobs=[-1.0, 0.5]), "above 0"),
    ],
)
def test_each_violation_is_counted_and_said(broken: Sample, says: str) -> None:
    found = facts(sample(5, STOP), broken)
    assert len(found) == 1
    assert found[0].startswith("1 of 2 completions")
    assert says in found[0]


def test_ids_that_do_not_fit_the_model() -> None:
    assert "1 of 1 prompts hold ids outside the model's vocabulary of 20" in facts(sample(5, STOP), prompt=(2, 20))[0]
    assert "[25]" in facts(sample(5, STOP), stops=(STOP, 25))[0]

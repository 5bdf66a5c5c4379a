"""Samplers that learn: who is drawn how often, and that what they learnt survives."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megatron_gcpo.data import CurriculumSampler, PromptSampler, make_sampler
from megatron_gcpo.data.curriculum import GaussianSampling, UniformSampling, VarianceSampling

SIZES = {"num_prompts": 9, "prompts_per_step": 2, "seed": 3, "num_replicas": 1}


def sampler(options=None, **sizes) -> CurriculumSampler:
    made = make_sampler(options or GaussianSampling(), **{**SIZES, **sizes})
    assert isinstance(made, CurriculumSampler)
    return made


def taught(made: CurriculumSampler, rates: list[float], visits: int = 80) -> CurriculumSampler:
    for _ in range(visits):
        made.update(made.tally(dict(enumerate(rates))))
    return made


def test_gaussian_weights_peak_at_one_half():
    """At 0 and 1 exp(-0.25 / (2 x 0.35^2)) = 0.36 of the peak, and the same on both sides."""
    weights = GaussianSampling().weights(np.array([0.0, 0.3, 0.5, 0.7, 1.0]))
    assert weights[2] == 1
    assert weights[0] == pytest.approx(weights[4]) == pytest.approx(0.3604, abs=1e-4)
    assert weights[1] == pytest.approx(weights[3])


def test_variance_weights():
    assert VarianceSampling(floor=0.1).weights(np.array([0.0, 0.5, 1.0])).tolist() == pytest.approx([0.1, 1.1, 0.1])


def test_estimates_are_moving_averages_from_one_half():
    made = sampler()
    made.update(made.tally({4: 1.0}))
    made.update(made.tally({4: 0.0, 5: 1.0}))
    assert made.state()["rates"] == {"4": pytest.approx(0.9 * 0.55), "5": pytest.approx(0.55)}


def test_frequencies_follow_the_weights():
    """One prompt a step: chances proportional to the weights, to within four standard errors."""
    rates = [0.0, 0.25, 0.5, 0.75, 1.0, 0.5, 0.0, 0.1, 0.9]
    made = taught(sampler(prompts_per_step=1), rates)
    weights = GaussianSampling().weights(np.array(rates))
    counts = np.bincount([made.select(step)[0] for step in range(4000)], minlength=9)
    chances = weights / weights.sum()
    errors = 4 * np.sqrt(chances * (1 - chances) / 4000)
    assert (np.abs(counts / 4000 - chances) < errors).all()


def test_a_step_and_its_rounds_have_distinct_prompts():
    made = taught(sampler(), [0.5] * 4 + [0.0] * 5)
    taken = [made.select(7, round) for round in range(6)]
    flat = [prompt for chunk in taken for prompt in chunk]
    assert sorted(flat) == list(range(9))
    assert [len(chunk) for chunk in taken] == [2, 2, 2, 2, 1, 0]


def test_replicas_share_a_step():
    made = sampler(prompts_per_step=4, num_replicas=2)
    assert sorted(made.share(1, 0) + made.share(1, 1)) == sorted(made.select(1))
    assert len(made.share(1, 0)) == len(made.share(1, 1)) == 2


def test_a_resumed_sampler_goes_on_alike():
    made = taught(sampler(), [0.0, 1.0, 0.5, 0.0, 0.0], visits=9)
    again = sampler()
    again.load(json.loads(json.dumps(made.state())))
    assert [again.select(s) for s in range(60)] == [made.select(s) for s in range(60)]
    assert [sampler().select(s) for s in range(60)] != [made.select(s) for s in range(60)]


def test_tallies_of_replicas_add_up():
    one, two = sampler(), sampler()
    one.update(one.tally({1: 0.25}) + one.tally({2: 1.0}))
    two.update(two.tally({1: 0.25, 2: 1.0}))
    assert one.state() == two.state()


def test_uniform_is_the_epoch_sampler_and_errors_are_its_errors():
    assert isinstance(make_sampler(UniformSampling(), **SIZES), PromptSampler)
    with pytest.raises(ValueError, match=r"rollout\.prompts_per_step 10 exceeds the 9 prompts"):
        sampler(prompts_per_step=10)
    with pytest.raises(ValueError, match="cannot be shared evenly by 3 data-parallel replicas"):
        sampler(prompts_per_step=4, num_replicas=3)

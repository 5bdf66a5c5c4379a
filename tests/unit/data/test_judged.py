"""The sampler that the policy judges for: who is chosen, what a forecast earns, and that nothing is forgotten."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.data import JudgedSampler, make_sampler
from megatron_gcpo.data.judged import NEUTRAL, JudgedSampling

SIZES = {"num_prompts": 30, "prompts_per_step": 4, "seed": 3, "num_replicas": 1}


def sampler(num_replicas: int = 1, **options) -> JudgedSampler:
    made = make_sampler(JudgedSampling(**options), **{**SIZES, "num_replicas": num_replicas})
    assert isinstance(made, JudgedSampler)
    return made


def judged(made: JudgedSampler, step: int, forecasts: list[float | None]) -> JudgedSampler:
    """After the step's forecasts; None: could not be read."""
    made.choose(
        step, np.array([[0.0 if f is None else f for f in forecasts], [f is not None for f in forecasts]]) * 1.0
    )
    return made


def visited(made: JudgedSampler, step: int, rewards: list[list[float]], round: int = 0):
    return made.update(made.tally({p: np.array(r) for p, r in zip(made.select(step, round), rewards, strict=True)}))


FORECASTS = [0.01, 0.2, None, 0.25, 0.0, 0.2, 0.03, None]


def test_the_largest_forecasts_are_chosen_in_the_order_of_the_candidates():
    """Sorted by brute force; an unreadable forecast stands in the middle; of two equal ones the earlier is taken."""
    made = judged(sampler(), 0, FORECASTS)
    candidates = made.candidates(0)
    assert len(set(candidates)) == 8
    assert made.select(0) == tuple(candidates[i] for i in (1, 2, 3, 5))
    assert made.select(0, 1) == tuple(candidates[i] for i in (0, 4, 6, 7))
    assert made.select(0, 2) == ()


@given(st.lists(st.one_of(st.none(), st.floats(0, 0.25)), min_size=8, max_size=8))
def test_no_candidate_left_out_was_forecast_higher(forecasts):
    made = judged(sampler(), 5, forecasts)
    value = {p: NEUTRAL if f is None else f for p, f in zip(made.candidates(5), forecasts, strict=True)}
    chosen = made.select(5)
    assert len(set(chosen)) == 4
    assert min(value[p] for p in chosen) >= max(value[p] for p in set(value) - set(chosen))


def test_candidates_come_epoch_by_epoch():
    made = sampler()
    seen = [p for step in range(15) for p in made.candidates(step)]
    assert all(sorted(seen[30 * e : 30 * (e + 1)]) == list(range(30)) for e in range(4))


def test_replicas_share_candidates_and_choices():
    made = judged(sampler(num_replicas=2), 1, FORECASTS)
    shares = [made.share_of_candidates(1, replica) for replica in (0, 1)]
    assert sorted(shares[0] + shares[1]) == sorted(made.candidates(1))
    assert sorted(made.share(1, 0) + made.share(1, 1)) == sorted(made.select(1))
    assert len(made.share(1, 0)) == len(made.share(1, 1)) == 2
    assert made.select(1) == judged(sampler(), 1, FORECASTS).select(1)


@given(st.integers(0, 250), st.integers(0, 8))
def test_reward_is_1_iff_exact_and_falls_with_the_square_of_the_error(thousandths, ones):
    """Rewards of 0 and 1 with share p of ones have the variance p (1 - p): here the shares of eighths."""
    forecast = thousandths / 1000
    variance = ones / 8 * (1 - ones / 8)
    made = judged(sampler(), 0, [forecast] * 8)
    paid = visited(made, 0, [[1.0] * ones + [0.0] * (8 - ones)] * 4)
    for place in range(4):
        assert paid.rewards_C[place] == pytest.approx(1 - 16 * (forecast - variance) ** 2)
        assert paid.errors_C[place] == pytest.approx(abs(forecast - variance))
        assert (paid.rewards_C[place] == 1) == (paid.errors_C[place] < 1e-9)
    assert np.isnan(paid.rewards_C[4:]).all()


def test_reward_is_0_at_the_largest_error():
    made = judged(sampler(), 0, [0.25, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    solved, half = [1.0] * 4, [0.0, 1.0] * 2
    paid = visited(made, 0, [solved, half, half, solved])
    assert paid.rewards_C[:4].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_what_cannot_be_read_earns_a_fixed_low_reward_whether_visited_or_not():
    made = judged(sampler(unreadable=-0.5), 0, FORECASTS)
    paid = visited(made, 0, [[0.0, 1.0]] * 4)
    assert paid.rewards_C[[2, 7]].tolist() == [-0.5, -0.5]
    assert np.isnan(paid.errors_C[[2, 7]]).all()
    assert np.isnan(paid.rewards_C[[0, 4, 6]]).all()  # read, not visited: nobody knows


def test_baseline_is_the_moving_average_of_earlier_steps():
    """The first step's own mean, then b <- decay b + (1 - decay) mean R, each step paid against the one before."""
    made = sampler(decay=0.75)
    exact, wrong = [0.25] * 8, [0.0] * 8
    half = [[0.0, 1.0]] * 4
    first = visited(judged(made, 0, exact), 0, half)
    assert first.advantages_C[:4].tolist() == [0.0] * 4
    second = visited(judged(made, 1, wrong), 1, half)
    assert second.advantages_C[:4].tolist() == [-1.0] * 4
    third = visited(judged(made, 2, exact), 2, half)
    assert third.advantages_C[:4].tolist() == [0.25] * 4
    assert made.state()["baseline"] == pytest.approx(0.75 * 0.75 + 0.25)


def test_a_step_without_a_known_reward_leaves_the_baseline_alone():
    made = judged(sampler(), 0, [0.1] * 8)
    paid = made.update(np.zeros((2, 30)))
    assert np.isnan(paid.advantages_C).all()
    assert made.state() == {"recent": [], "baseline": None}


def test_the_last_outcomes_are_remembered_over_steps_and_rounds():
    made = judged(sampler(recent=3), 0, FORECASTS)
    visited(made, 0, [[0.0, 1.0], [1.0, 1.0], [0.0, 0.5], [0.0, 0.0]])
    last = made.select(0)[1:]
    assert made.recent == ((last[0], 0.0), (last[1], 0.0625), (last[2], 0.0))
    judged(made, 1, FORECASTS)
    second = made.select(1, 1)[0]
    made.update(made.tally({second: np.array([0.0, 1.0])}))
    assert made.recent == ((last[1], 0.0625), (last[2], 0.0), (second, 0.25))
    none = judged(sampler(recent=0), 0, FORECASTS)
    visited(none, 0, [[0.0, 1.0]] * 4)
    assert none.recent == ()


def test_a_resumed_sampler_goes_on_alike():
    made, again = sampler(), sampler()
    visited(judged(made, 0, FORECASTS), 0, [[0.0, 1.0], [1.0, 1.0], [0.0, 0.3], [0.0, 0.0]])
    again.load(json.loads(json.dumps(made.state())))
    assert again.recent == made.recent
    rewards = [[0.0, 1.0], [1.0, 1.0], [0.0, 0.25], [0.0, 0.0]]
    paid = [visited(judged(s, 1, FORECASTS), 1, rewards) for s in (made, again, sampler())]
    assert np.array_equal(paid[0].advantages_C, paid[1].advantages_C, equal_nan=True)
    assert not np.array_equal(paid[0].advantages_C, paid[2].advantages_C, equal_nan=True)
    assert made.state() == again.state()


def test_tallies_of_replicas_add_up():
    one, two = (judged(sampler(), 0, FORECASTS) for _ in range(2))
    seen = {p: np.array([0.0, 1.0, 1.0]) * (i + 1) / 4 for i, p in enumerate(one.select(0))}
    halves = [dict(list(seen.items())[:1]), dict(list(seen.items())[1:])]
    one.update(one.tally(seen))
    two.update(two.tally(halves[0]) + two.tally(halves[1]))
    assert one.state() == two.state()


def test_prompts_cannot_be_had_before_they_are_judged():
    with pytest.raises(AssertionError, match="whose candidates were judged"):
        sampler().select(0)


def test_too_few_prompts_for_the_candidates():
    with pytest.raises(ValueError, match=r"32 candidates a step \(8 x rollout\.prompts_per_step 4\).*candidates to 7"):
        sampler(candidates=8)
    with pytest.raises(ValueError, match=r"prompts_per_step 4 cannot be shared evenly by 3"):
        sampler(num_replicas=3)

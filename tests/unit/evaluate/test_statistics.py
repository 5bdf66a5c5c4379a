"""Intervals cover, majorities count, overlaps are found."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from megatron_gcpo.evaluate.contamination import find_overlaps
from megatron_gcpo.evaluate.intervals import mean_interval, paired_interval
from megatron_gcpo.evaluate.majority import majority_at_k


@pytest.mark.parametrize("n", [5, 40])
def test_intervals_hold_the_true_mean_about_as_often_as_they_say(n: int) -> None:
    rng = np.random.default_rng(1)
    held = [i.low <= 2.0 <= i.high for i in (mean_interval(rng.normal(2.0, 3.0, n), level=0.8) for _ in range(300))]
    assert 0.70 < np.mean(held) < 0.88


@pytest.mark.parametrize("n", [2, 3, 4, 6, 10])
@pytest.mark.parametrize("spread", ["normal", "standard_exponential", "uniform"])
def test_few_seeds_hold_their_level_where_a_percentile_interval_does_not(n: int, spread: str) -> None:
    """Paired differences of a few seeds around 0.3 that also share a large effect of the seed, 1000 times over.

    The oracle is Student's interval of the same differences, which is exact for normal values.
    """
    rng = np.random.default_rng(n)
    seeds, noise = rng.normal(0, 5, (1000, n)), getattr(rng, spread)(size=(1000, n))
    centre = {"normal": 0.0, "standard_exponential": 1.0, "uniform": 0.5}[spread]
    found = [paired_interval(s + 0.3 + e - centre, s) for s, e in zip(seeds, noise, strict=True)]
    held = np.mean([i.low <= 0.3 <= i.high for i in found])
    factor = np.sqrt(n / (n - 1)) * stats.t.ppf(0.975, n - 1) / stats.norm.ppf(0.975)
    plain = np.mean([i.mean + (i.low - i.mean) / factor <= 0.3 <= i.mean + (i.high - i.mean) / factor for i in found])
    mean, error = noise.mean(1) - centre, noise.std(1, ddof=1) / np.sqrt(n)
    student = np.mean(abs(mean) <= stats.t.ppf(0.975, n - 1) * error)
    assert student - 0.05 < held < student + 0.02
    assert plain < held - (0.015 if n == 10 else 0.05)
    assert n > 3 or plain < 0.7, "the interval that was found too narrow"


def test_interval_of_two_values_by_hand() -> None:
    """Resamples of (0, 1): means 0, 1/2, 1/2, 1, whose middle half is 0.375 to 0.625; sqrt(2) and t_1 / z at 75 %."""
    interval = mean_interval([0.0, 1.0], level=0.5)
    half = 0.125 * np.sqrt(2) * 1.0 / stats.norm.ppf(0.75)  # Student's quantile with one degree of freedom is 1
    assert (interval.low, interval.high) == pytest.approx((0.5 - half, 0.5 + half))


def test_many_values_give_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(0.3, 1.0, 400)
    found, error = mean_interval(values), 1.96 * values.std() / 20
    assert (found.low, found.high) == pytest.approx((found.mean - error, found.mean + error), abs=0.01)
    assert found == mean_interval(values)


def test_interval_of_equal_values_is_a_point_and_of_one_value_is_infinite() -> None:
    point = mean_interval([0.5] * 9)
    assert (point.low, point.mean, point.high) == (0.5, 0.5, 0.5)
    assert mean_interval([0.5]).high == np.inf
    for bad in ([], [0.0, float("nan")]):
        with pytest.raises(ValueError, match="finite values"):
            mean_interval(bad)


def test_pairing_takes_out_what_both_sides_share() -> None:
    rng = np.random.default_rng(2)
    difficulty = rng.normal(0, 10, 50)
    paired = paired_interval(difficulty + 1 + rng.normal(0, 0.1, 50), difficulty)
    assert 0.9 < paired.low < 1 < paired.high < 1.1
    with pytest.raises(ValueError, match="50 and 3 values"):
        paired_interval(difficulty, [1, 2, 3])


def test_majority_of_all_and_of_one() -> None:
    answers, correct = ["7", "7.0", "8", "8", None], [True, True, False, False, False]
    assert majority_at_k(answers, correct, 5) == 0.5, "two right in two spellings against two of one wrong answer"
    assert majority_at_k(answers, correct, 1) == 0.4
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    with pytest.raises(ValueError, match="k = 6"):
        majority_at_k(answers, correct, 6)


def test_majority_at_k_is_the_mean_over_all_subsets() -> None:
    answers, correct = ["7"] * 4 + ["8"] * 3 + ["9"], [True] * 4 + [False] * 4
    exact = np.mean(
        [majority_at_k([answers[i] for i in s], [correct[i] for i in s], 3) for s in combinations(range(8), 3)]
    )
    assert abs(majority_at_k(answers, correct, 3) - exact) < 0.05


def test_planted_overlap_is_found_whatever_its_case_and_punctuation() -> None:
    shared = "A train leaves the station at noon and travels north at sixty miles per hour exactly"
    training = ["Something else entirely.", f"Prelude. {shared.upper()}! How far?", "short one"]
    problems = [
        ("clean", "A train leaves the station at noon and travels south at sixty miles per hour"),
        ("whole", shared),
        ("part", "Once upon a time, " + shared),
        ("short", "Short: one?"),
    ]
    found = {overlap.prompt_id: overlap for overlap in find_overlaps(problems, training)}
    assert set(found) == {"whole", "part", "short"}
    assert found["whole"].share == 1.0
    assert 0 < found["part"].share < 1
    assert found["part"].example.startswith("a train leaves")
    assert find_overlaps(problems, []) == []

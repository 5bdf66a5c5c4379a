"""Intervals cover, majorities count, overlaps are found."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from megatron_gcpo.evaluate.contamination import find_overlaps
from megatron_gcpo.evaluate.intervals import mean_interval, paired_interval
from megatron_gcpo.evaluate.majority import majority_at_k


@pytest.mark.parametrize("n", [5, 40])
def test_intervals_hold_the_true_mean_about_as_often_as_they_say(n: int) -> None:
    rng = np.random.default_rng(1)
    held = [i.low <= 2.0 <= i.high for i in (mean_interval(rng.normal(2.0, 3.0, n), level=0.8) for _ in range(300))]
    assert 0.70 < np.mean(held) < 0.88


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

"""From credits to advantages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gcpo.credit import gcpo_advantages, shapley_values

from .oracle import games, random_team, teams

FLOOR = 0.05 * math.log(11)


@settings(max_examples=25, deadline=None)
@given(
    teams(),
    games(),
    st.sampled_from(["std", "mean", "none"]),
    st.sampled_from([None, 0.0, 0.3]),
    st.sampled_from([0.0, 0.25, 1.0]),
)
def test_equals_the_formula(team, game, normalize, floor, credit_mix):
    phi_G = shapley_values(*team, **game)
    pay_G = (1 - credit_mix) * phi_G + credit_mix * team[1]
    floor_in_force = 0.05 * math.log(1 + game["c"]) if floor is None else floor
    expected_G = {
        "std": (pay_G - pay_G.mean()) / max(pay_G.std() + floor_in_force, 1e-300),
        "mean": pay_G - pay_G.mean(),
        "none": pay_G,
    }[normalize]
    if normalize == "std" and pay_G.std() < 1e-9 * np.abs(pay_G).max(initial=0):
        expected_G = np.zeros_like(pay_G)
    actual_G = gcpo_advantages(*team, normalize=normalize, floor=floor, credit_mix=credit_mix, **game)
    np.testing.assert_allclose(actual_G, expected_G, rtol=1e-7, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(teams(), st.randoms(use_true_random=False))
def test_permuting_the_rollouts_permutes_the_advantages(team, random):
    order = list(range(len(team[1])))
    random.shuffle(order)
    shuffled_G = gcpo_advantages(team[0][order], team[1][order])
    np.testing.assert_allclose(shuffled_G, gcpo_advantages(*team)[order], atol=1e-9)


@pytest.mark.parametrize("size", [2, 4, 16])
def test_one_right_rollout_is_paid_as_by_grpo(size):
    """phi is log(1 + c) times the reward, so without a floor both give sqrt(G - 1) to one and -1 / sqrt(G - 1) to the
    others; the default floor shrinks all by std / (std + floor), std = log(1 + c) sqrt(G - 1) / G."""
    rewards_G = np.eye(size)[0]
    grpo_G = (rewards_G - rewards_G.mean()) / rewards_G.std()
    np.testing.assert_allclose(gcpo_advantages(None, rewards_G, floor=0.0), grpo_G, rtol=1e-12)
    std = math.log(11) * math.sqrt(size - 1) / size
    np.testing.assert_allclose(gcpo_advantages(None, rewards_G), grpo_G * std / (std + FLOOR), rtol=1e-12)


def test_all_wrong_is_all_zero():
    for floor in (None, 0.0):
        assert (gcpo_advantages(None, np.zeros(5), floor=floor) == 0).all()


def test_all_right_but_different_still_carries_signal():
    """Three copies earn log(31) / 3 each, the new direction log(11); GRPO sees four equal rewards. With gap g the std
    is g sqrt(3) / 4 and the new direction lies 3 g / 4 above the mean."""
    gap = math.log(11) - math.log(31) / 3
    new = 0.75 * gap / (gap * math.sqrt(3) / 4 + FLOOR)
    advantages_G = gcpo_advantages(np.eye(2)[[0, 0, 0, 1]], np.ones(4))
    np.testing.assert_allclose(advantages_G, [-new / 3, -new / 3, -new / 3, new], rtol=1e-12)


def test_near_identical_right_answers_are_not_blown_up():
    """Embeddings that differ by 1e-3: the credits differ by noise, and the floor keeps it small."""
    rng = np.random.default_rng(0)
    embeddings_GD = np.ones(32) + 1e-3 * rng.normal(size=(8, 32))
    embeddings_GD /= np.linalg.norm(embeddings_GD, axis=1, keepdims=True)
    assert np.abs(gcpo_advantages(embeddings_GD, np.ones(8))).max() < 1e-3
    assert np.abs(gcpo_advantages(embeddings_GD, np.ones(8), floor=0.0)).max() > 1


def test_identical_answers_stay_equal_without_a_floor():
    for size in (7, 16):
        embeddings_GD = np.tile(random_team(np.random.default_rng(size), 1)[0], (size, 1))
        assert (gcpo_advantages(embeddings_GD, np.ones(size), floor=0.0) == 0).all()


def test_full_mix_is_the_reward():
    embeddings_GD, rewards_G = random_team(np.random.default_rng(2), 6)
    expected_G = (rewards_G - rewards_G.mean()) / rewards_G.std()
    np.testing.assert_allclose(gcpo_advantages(embeddings_GD, rewards_G, credit_mix=1, floor=0.0), expected_G)


def test_tensor_in_tensor_out():
    advantages_G = gcpo_advantages(None, torch.tensor([1.0, 0.0]), normalize="mean")
    assert advantages_G.tolist() == pytest.approx([math.log(11) / 2, -math.log(11) / 2])
    assert advantages_G.dtype == torch.float64


def split(embeddings_GD, rewards_G, **options):
    return gcpo_advantages(embeddings_GD, rewards_G, normalize="split", **options)


def grpo(rewards_G):
    return (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-4)


@pytest.mark.parametrize("cooperation", [0.0, 1.0, 3.0])
def test_split_of_a_lone_right_answer_or_of_none_is_grpo(cooperation):
    """A lone correct rollout has the whole value of the team, which is also its share by accuracy: delta = 0."""
    embeddings_GD = random_team(np.random.default_rng(3), 5)[0]
    for rewards_G in (np.array([0.0, 0, 1, 0, 0]), np.zeros(5)):
        np.testing.assert_allclose(
            split(embeddings_GD, rewards_G, cooperation=cooperation), grpo(rewards_G), rtol=1e-12
        )


def test_split_without_cooperation_is_grpo_and_is_linear_in_it():
    embeddings_GD, rewards_G = random_team(np.random.default_rng(4), 7)
    base_G = split(embeddings_GD, rewards_G, cooperation=0.0)
    np.testing.assert_allclose(base_G, grpo(rewards_G), rtol=1e-12)
    once_G, twice_G = (split(embeddings_GD, rewards_G, cooperation=w) - base_G for w in (1.0, 2.0))
    np.testing.assert_allclose(twice_G, 2 * once_G, rtol=1e-12)


def test_split_redistributes_among_right_answers_only():
    """m copies of one direction and one orthogonal answer, all right: phi = log(1 + mc) / m each and log(1 + c)."""
    m, c = 5, 10.0
    embeddings_GD, rewards_G = np.eye(2)[[0] * m + [1, 1]], np.array([1.0] * (m + 1) + [0])
    redistributed_G = split(embeddings_GD, rewards_G, c=c) - grpo(rewards_G)
    copy, unique = math.log1p(m * c) / m, math.log1p(c)
    mean = (m * copy + unique) / (m + 1)
    expected_G = np.array([copy - mean] * m + [unique - mean, 0.0]) / math.log1p(c)
    np.testing.assert_allclose(redistributed_G, expected_G, atol=1e-12)
    assert redistributed_G.sum() == pytest.approx(0, abs=1e-12)


def test_split_keeps_a_large_right_cluster_above_wrong_answers_by_more_than_std_does():
    """Six copies, one different, one wrong: under std the copies fall to the side of the wrong one, under split not."""
    embeddings_GD, rewards_G = np.eye(2)[[0] * 6 + [1, 1]], np.array([1.0] * 7 + [0])
    assert gcpo_advantages(embeddings_GD, rewards_G)[0] < 0 < split(embeddings_GD, rewards_G)[0]


@pytest.mark.parametrize("value", ["logdet", "det"])
def test_split_measures_in_values_of_one_right_answer(value):
    embeddings_GD = np.eye(3)
    np.testing.assert_allclose(split(embeddings_GD, np.ones(3), value=value), 0, atol=1e-12)


@pytest.mark.parametrize("cooperation", [-1.0, math.inf, math.nan, "1"])
def test_cooperation_must_be_a_number_of_at_least_zero(cooperation):
    with pytest.raises(ValueError, match="cooperation"):
        gcpo_advantages(None, np.array([1.0, 0.0]), cooperation=cooperation)

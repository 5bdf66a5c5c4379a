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

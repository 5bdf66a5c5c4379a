"""Shapley values: the axioms, the closed forms of the game, brute force, and the sampled estimate."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gcpo.credit import log_volume_lattice, shapley_values, team_credit, team_value

from .oracle import brute_force_shapley, games, random_team, teams, value_of


@settings(max_examples=30, deadline=None)
@given(teams(), games())
def test_equals_the_definition(team, game):
    embeddings_GD, rewards_G = team
    expected_G = brute_force_shapley(embeddings_GD, rewards_G, **game)
    scale = max(1.0, np.abs(expected_G).max())
    np.testing.assert_allclose(shapley_values(embeddings_GD, rewards_G, **game), expected_G, rtol=0, atol=1e-9 * scale)


@pytest.mark.parametrize("k", range(13))
def test_equals_enumeration_up_to_twelve(k):
    """All 2^k values one by one; phi from the permutation weights. Rewards of 1 and below, plus two wrong rollouts."""
    rng = np.random.default_rng(k)
    embeddings_GD, _ = random_team(rng, k + 2, dim=8)
    rewards_G = np.r_[rng.uniform(0.1, 1, k), 0.0, 0.0]
    values = np.array(
        [value_of(embeddings_GD, rewards_G, [i for i in range(k) if mask >> i & 1]) for mask in range(1 << k)]
    )
    sizes = np.array([mask.bit_count() for mask in range(1 << k)])
    phi_G = np.zeros(k + 2)
    for i in range(k):
        without = np.array([mask for mask in range(1 << k) if not mask >> i & 1])
        shares = np.array([math.factorial(s) * math.factorial(k - s - 1) for s in sizes[without]]) / math.factorial(k)
        phi_G[i] = shares @ (values[without | 1 << i] - values[without])
    np.testing.assert_allclose(shapley_values(embeddings_GD, rewards_G), phi_G, rtol=0, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(teams(), games())
def test_credits_sum_to_the_team_value(team, game):
    everyone = np.ones((1, len(team[1])))
    total = team_value(*team, everyone, **game)[0]
    assert shapley_values(*team, **game).sum() == pytest.approx(total, rel=1e-10, abs=1e-10)
    assert team_credit(*team, **game).team_value == pytest.approx(total, rel=1e-10, abs=1e-10)


@settings(max_examples=30, deadline=None)
@given(teams(), games(), st.randoms(use_true_random=False))
def test_permuting_the_rollouts_permutes_the_credits(team, game, random):
    embeddings_GD, rewards_G = team
    order = list(range(len(rewards_G)))
    random.shuffle(order)
    phi_G = shapley_values(embeddings_GD, rewards_G, **game)
    shuffled_G = shapley_values(embeddings_GD[order], rewards_G[order], **game)
    np.testing.assert_allclose(shuffled_G, phi_G[order], rtol=1e-9, atol=1e-11)


@settings(max_examples=30, deadline=None)
@given(teams(), games())
def test_wrong_rollouts_earn_exactly_nothing_and_change_nothing(team, game):
    embeddings_GD, rewards_G = team
    rewards_G = rewards_G.copy()
    rewards_G[0] = 0
    phi_G = shapley_values(embeddings_GD, rewards_G, **game)
    assert (phi_G[rewards_G == 0] == 0).all()
    right = rewards_G > 0
    if right.any():
        np.testing.assert_array_equal(phi_G[right], shapley_values(embeddings_GD[right], rewards_G[right], **game))
    blank_GD = np.where(right[:, None], embeddings_GD, 0)
    np.testing.assert_array_equal(phi_G, shapley_values(blank_GD, rewards_G, **game))


@settings(max_examples=25, deadline=None)
@given(teams(), games())
def test_duplicates_earn_the_same_and_less_than_alone(team, game):
    """v is monotone, and log det submodular: a copy never raises what the original earns."""
    embeddings_GD, rewards_G = team
    rewards_G = rewards_G.copy()
    rewards_G[0] = 0.7
    alone_G = shapley_values(embeddings_GD, rewards_G, **game)
    with_copy_G = shapley_values(np.vstack([embeddings_GD, embeddings_GD[:1]]), np.r_[rewards_G, 0.7], **game)
    assert with_copy_G[0] == pytest.approx(with_copy_G[-1], rel=1e-10)
    if game["value"] == "logdet":
        assert with_copy_G[0] < alone_G[0]


@pytest.mark.parametrize("c", [0.5, 10.0])
@pytest.mark.parametrize("copies", [1, 2, 5])
def test_identical_copies_orthogonal_to_the_rest_share_log_1_mc(c, copies):
    """I + c 11^T has determinant 1 + m c, and orthogonal blocks add up: each copy gets log(1 + m c) / m, the two
    others, orthogonal to everything, log(1 + c)."""
    embeddings_GD = np.eye(6)[[0] * copies + [3, 5]]
    phi_G = shapley_values(embeddings_GD, np.ones(copies + 2), c=c)
    np.testing.assert_allclose(phi_G[:copies], math.log1p(copies * c) / copies, rtol=1e-12)
    np.testing.assert_allclose(phi_G[copies:], math.log1p(c), rtol=1e-12)


@settings(max_examples=25, deadline=None)
@given(teams(min_size=2, max_size=6))
def test_a_copy_never_adds_more_than_a_new_direction(team):
    """A copy of rollout 0 gains log det of a smaller Schur complement than a unit vector outside the span."""
    embeddings_GD, rewards_G = team
    rewards_G = np.r_[np.where(np.arange(len(rewards_G)) == 0, 1.0, rewards_G), 1.0]
    padded_GD = np.pad(embeddings_GD, ((0, 0), (0, 1)))
    everyone = np.ones((1, len(rewards_G)))
    with_copy = team_value(np.vstack([padded_GD, padded_GD[:1]]), rewards_G, everyone)[0]
    new = np.eye(padded_GD.shape[1])[-1:]
    with_new = team_value(np.vstack([padded_GD, new]), rewards_G, everyone)[0]
    assert with_copy < with_new


@pytest.mark.parametrize(
    ("reward_map", "weight"), [("sqrt", math.sqrt(0.25)), ("identity", 0.25), ("binary", 1.0)], ids=str
)
@pytest.mark.parametrize(("value", "worth"), [("logdet", math.log1p), ("det", float)])
def test_one_alone_needs_no_embedding(reward_map, weight, value, worth):
    rewards_G = np.array([0.0, 0.25, 0.0])
    expected_G = [0.0, worth(10 * weight**2), 0.0]
    for embeddings_GD in (None, np.zeros((3, 4)), np.eye(3)):
        phi_G = shapley_values(embeddings_GD, rewards_G, value=value, reward_map=reward_map)
        np.testing.assert_allclose(phi_G, expected_G, rtol=1e-12)


def test_nobody_right_and_group_of_one():
    assert (shapley_values(None, np.zeros(4)) == 0).all()
    assert (shapley_values(np.zeros((4, 2)), np.zeros(4), value="det") == 0).all()
    assert shapley_values(np.array([[1.0]]), np.array([1.0])) == pytest.approx([math.log(11)])


def test_lattice_lists_every_coalition():
    """Bit i of the index is member i."""
    rng = np.random.default_rng(0)
    embeddings_GD, _ = random_team(rng, 7)
    kernel_KK = 10 * embeddings_GD @ embeddings_GD.T
    expected = [value_of(embeddings_GD, np.ones(7), [i for i in range(7) if m >> i & 1]) for m in range(1 << 7)]
    np.testing.assert_allclose(log_volume_lattice(kernel_KK), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [13, 16])
def test_exact_without_an_oracle_too_large_to_enumerate(k):
    """Two orthogonal subteams: the game is a sum of two, so each half earns what it earns by itself."""
    rng = np.random.default_rng(k)
    first, _ = random_team(rng, k // 2, dim=5)
    second, _ = random_team(rng, k - k // 2, dim=5)
    both_GD = np.block([[first, np.zeros_like(first)], [np.zeros_like(second), second]])
    rewards_G = rng.uniform(0.2, 1, k)
    expected_G = np.r_[shapley_values(first, rewards_G[: k // 2]), shapley_values(second, rewards_G[k // 2 :])]
    np.testing.assert_allclose(shapley_values(both_GD, rewards_G), expected_G, rtol=0, atol=1e-11)


def test_memory_stays_below_32_bytes_per_coalition():
    rng = np.random.default_rng(0)
    embeddings_GD, _ = random_team(rng, 17, dim=32)
    tracemalloc.start()
    shapley_values(embeddings_GD, np.ones(17))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 2**17


class TestSampled:
    def test_within_its_own_error_of_the_exact_values(self):
        rng = np.random.default_rng(3)
        embeddings_GD, rewards_G = random_team(rng, 14, dim=8)
        exact_G = shapley_values(embeddings_GD, rewards_G)
        estimate = team_credit(embeddings_GD, rewards_G, exact_limit=3, num_permutations=2000)
        assert estimate.sampled
        right = rewards_G > 0
        assert (estimate.stderr_G[right] > 0).all()
        assert (estimate.stderr_G[~right] == 0).all()
        assert (np.abs(estimate.credits_G - exact_G)[right] < 5 * estimate.stderr_G[right]).all()
        assert estimate.credits_G.sum() == pytest.approx(exact_G.sum(), rel=1e-12)

    def test_standard_error_is_the_spread_over_seeds(self):
        """64 independent seeds: the spread of the estimates is what each of them claims, within a factor 1.35."""
        rng = np.random.default_rng(4)
        embeddings_GD, _ = random_team(rng, 8)
        runs = [
            team_credit(embeddings_GD, np.ones(8), exact_limit=0, num_permutations=64, seed=seed) for seed in range(64)
        ]
        spread_G = np.std([run.credits_G for run in runs], axis=0, ddof=1)
        claimed_G = np.sqrt(np.mean([run.stderr_G**2 for run in runs], axis=0))
        ratio_G = spread_G / claimed_G
        assert ratio_G.min() > 1 / 1.35
        assert ratio_G.max() < 1.35

    def test_reverse_orders_halve_the_work(self):
        """Antithetic pairs beat as many independent orders: an early joiner of one is a late joiner of the other."""
        rng = np.random.default_rng(5)
        embeddings_GD, _ = random_team(rng, 10)
        estimate = team_credit(embeddings_GD, np.ones(10), exact_limit=0, num_permutations=4000)
        kernel_KK = np.eye(10) + 10 * embeddings_GD @ embeddings_GD.T
        orders = rng.permuted(np.tile(np.arange(10), (4000, 1)), axis=1)
        factors = np.linalg.cholesky(kernel_KK[orders[:, :, None], orders[:, None, :]])
        gains = np.empty(orders.shape)
        np.put_along_axis(gains, orders, 2 * np.log(np.diagonal(factors, axis1=1, axis2=2)), 1)
        independent_G = gains.std(0, ddof=1) / math.sqrt(4000)
        assert (estimate.stderr_G < 0.8 * independent_G).all()

    def test_same_seed_same_numbers(self):
        rng = np.random.default_rng(6)
        embeddings_GD, _ = random_team(rng, 24)
        first = shapley_values(embeddings_GD, np.ones(24), num_permutations=32, seed=1)
        np.testing.assert_array_equal(first, shapley_values(embeddings_GD, np.ones(24), num_permutations=32, seed=1))
        assert (first != shapley_values(embeddings_GD, np.ones(24), num_permutations=32, seed=2)).any()

    def test_beyond_the_limit_only_and_never_for_det(self):
        rng = np.random.default_rng(7)
        embeddings_GD, _ = random_team(rng, 5)
        assert not team_credit(embeddings_GD, np.ones(5), exact_limit=5).sampled
        assert team_credit(embeddings_GD, np.ones(5), exact_limit=4).sampled
        det = team_credit(embeddings_GD, np.ones(5), exact_limit=0, value="det")
        assert not det.sampled
        np.testing.assert_allclose(
            det.credits_G, brute_force_shapley(embeddings_GD, np.ones(5), value="det"), rtol=1e-10
        )


def test_tensors_in_tensor_out():
    rng = np.random.default_rng(8)
    embeddings_GD, rewards_G = random_team(rng, 6)
    from_numpy = shapley_values(embeddings_GD, rewards_G)
    assert isinstance(from_numpy, np.ndarray)
    from_torch = shapley_values(torch.tensor(embeddings_GD, requires_grad=True), torch.tensor(rewards_G))
    assert isinstance(from_torch, torch.Tensor)
    assert from_torch.dtype == torch.float64
    assert not from_torch.requires_grad
    np.testing.assert_array_equal(from_torch.numpy(), from_numpy)
    single = shapley_values(torch.tensor(embeddings_GD).float(), torch.tensor(rewards_G).float())
    np.testing.assert_allclose(single.numpy(), from_numpy, atol=1e-5)

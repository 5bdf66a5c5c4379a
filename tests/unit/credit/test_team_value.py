"""The value of coalitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from megatron_gcpo.credit import team_value

from .oracle import games, random_team, teams, value_of


@settings(max_examples=25, deadline=None)
@given(teams(max_size=5), games())
def test_equals_the_determinant_of_every_coalition(team, game):
    embeddings_GD, rewards_G = team
    masks_CG = np.array(list(itertools.product([0, 1], repeat=len(rewards_G))))
    expected_C = [value_of(embeddings_GD, rewards_G, np.flatnonzero(mask), **game) for mask in masks_CG]
    np.testing.assert_allclose(
        team_value(embeddings_GD, rewards_G, masks_CG, **game), expected_C, rtol=1e-9, atol=1e-12
    )


@settings(max_examples=25, deadline=None)
@given(teams(min_size=3), games())
def test_never_falls_and_log_volume_has_falling_returns(team, game):
    """v(S + i) >= v(S); for log det also v(S + i) - v(S) >= v(S + j + i) - v(S + j)."""
    masks_CG = np.zeros((4, len(team[1])), dtype=bool)
    masks_CG[:, 2:] = np.random.default_rng(0).integers(0, 2, len(team[1]) - 2)
    masks_CG[[1, 3], 0] = True
    masks_CG[[2, 3], 1] = True
    none, i, j, both = team_value(*team, masks_CG, **game)
    slack = 1e-9 * max(1.0, both)
    assert i >= none - slack
    assert both >= j - slack
    if game["value"] == "logdet":
        assert i - none >= both - j - slack


def test_empty_coalition_and_no_coalition():
    embeddings_GD, rewards_G = np.eye(3), np.ones(3)
    assert team_value(embeddings_GD, rewards_G, np.zeros((1, 3))) == [0.0]
    assert team_value(embeddings_GD, rewards_G, np.zeros((0, 3))).shape == (0,)
    assert (team_value(None, np.zeros(3), np.ones((2, 3))) == 0).all()


def test_wrong_rollouts_change_no_coalition():
    embeddings_GD, _ = random_team(np.random.default_rng(0), 4)
    rewards_G = np.array([1.0, 0.0, 0.5, 0.0])
    with_wrong, without = team_value(embeddings_GD, rewards_G, [[1, 1, 1, 1], [1, 0, 1, 0]])
    assert with_wrong == without


def test_more_coalitions_than_fit_into_one_chunk(monkeypatch):
    monkeypatch.setattr("megatron_gcpo.credit.coalition.CHUNK_BYTES", 8 * 16 * 3)
    embeddings_GD, _ = random_team(np.random.default_rng(1), 4)
    masks_CG = np.array(list(itertools.product([0, 1], repeat=4)))
    expected_C = [value_of(embeddings_GD, np.ones(4), np.flatnonzero(mask)) for mask in masks_CG]
    np.testing.assert_allclose(team_value(embeddings_GD, np.ones(4), masks_CG), expected_C, atol=1e-12)


def test_tensor_masks_give_tensors():
    values_C = team_value(np.eye(2), np.ones(2), torch.ones(1, 2, dtype=torch.bool), c=3.0)
    assert isinstance(values_C, torch.Tensor)
    assert values_C.item() == pytest.approx(2 * math.log(4))


def test_det_beyond_float64_says_so():
    """(1 + c)^300 with c = 1e3 is 1e900."""
    with pytest.raises(ValueError, match="value=logdet"):
        team_value(np.eye(300), np.ones(300), np.ones((1, 300)), value="det", c=1e3)

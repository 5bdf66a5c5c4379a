"""Every kind of bad input dies with one line that names the place and the remedy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_gcpo.credit import gcpo_advantages, shapley_values, team_value

UNIT_GD = np.eye(3)
ONES_G = np.ones(3)
NAN_GD = np.array([[1.0, 0, 0], [0, np.nan, 0], [0, 0, 1]])


@pytest.mark.parametrize(
    ("embeddings_GD", "rewards_G", "message"),
    [
        (UNIT_GD, [1.0, 1.2, 0.0], r"rewards_G\[1\] = 1.2 is outside \[0, 1\]"),
        (UNIT_GD, [1.0, 1.0, -0.5], r"rewards_G\[2\] = -0.5 is outside"),
        (UNIT_GD, [1.0, np.nan, 0.0], r"rewards_G\[1\] is nan"),
        (UNIT_GD, [np.inf, 1.0, 0.0], r"rewards_G\[0\] is inf"),
        (UNIT_GD, [[1.0, 1.0, 0.0]], r"rewards_G has shape \(1, 3\)"),
        (UNIT_GD, [], r"rewards_G has shape \(0,\)"),
        (UNIT_GD, ["a", "b", "c"], "rewards_G is not a rectangular array of numbers"),
        (NAN_GD, ONES_G, r"embeddings_GD\[1\] holds NaN"),
        (NAN_GD, [1.0, 0.0, 0.0], r"embeddings_GD\[1\] holds NaN"),
        (UNIT_GD * [[1], [0], [1]], ONES_G, r"embeddings_GD\[1\] is all zeros .* reward 1"),
        (UNIT_GD * [[1], [1], [2]], [0.0, 1.0, 0.5], r"embeddings_GD\[2\] has norm 2 .* reward 0.5"),
        (UNIT_GD * 3, [0.0, 0.0, 0.5], r"embeddings_GD\[2\] has norm 3"),
        (UNIT_GD[:2], ONES_G, r"embeddings_GD has shape \(2, 3\) for 3 rewards"),
        (ONES_G, ONES_G, r"embeddings_GD has shape \(3,\)"),
        (None, [0.0, 1.0, 1.0], "embeddings_GD is None but 2 rollouts are rewarded"),
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_one_line_names_the_culprit(embeddings_GD, rewards_G, message, as_tensor):
    if as_tensor and not any(isinstance(r, str) for r in rewards_G):
        embeddings_GD = None if embeddings_GD is None else torch.tensor(embeddings_GD)
        rewards_G = torch.tensor(rewards_G)
    for call in (
        lambda: shapley_values(embeddings_GD, rewards_G),
        lambda: gcpo_advantages(embeddings_GD, rewards_G),
        lambda: team_value(embeddings_GD, rewards_G, np.ones((1, 3))),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_rows_of_wrong_rollouts_may_be_anything_finite():
    with_junk = shapley_values(UNIT_GD * [[1], [7], [1]], [1.0, 0.0, 1.0])
    assert with_junk[1] == 0


def test_almost_unit_rows_pass():
    rows = torch.nn.functional.normalize(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    assert torch.isfinite(shapley_values(rows.bfloat16(), torch.ones(3))).all()


def test_group_of_one_has_no_advantage():
    with pytest.raises(ValueError, match=r"rollout\.group_size"):
        gcpo_advantages(UNIT_GD[:1], [1.0])


@pytest.mark.parametrize(
    ("masks_CG", "message"),
    [
        (np.ones(3), r"masks_CG has shape \(3,\): expected \[C, 3\]"),
        (np.ones((2, 4)), r"masks_CG has shape \(2, 4\)"),
        (np.full((1, 3), 0.5), "other values than 0 and 1"),
        (np.full((1, 3), np.nan), "other values than 0 and 1"),
    ],
)
def test_bad_masks(masks_CG, message):
    with pytest.raises(ValueError, match=message):
        team_value(UNIT_GD, ONES_G, masks_CG)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_mapp": "sqrt"}, "did you mean 'reward_map'"),
        ({"value": "volume"}, "value = 'volume' is not usable: set it to one of logdet, det"),
        ({"reward_map": "cube"}, "sqrt, identity, binary"),
        ({"normalize": True}, "std, split, mean, none"),
        ({"c": 0}, "c = 0 is not usable"),
        ({"c": float("nan")}, "c = nan"),
        ({"c": 1e12}, "float64 loses"),
        ({"c": "10"}, "c = '10'"),
        ({"floor": -1.0}, "floor = -1.0"),
        ({"credit_mix": 1.5}, r"within \[0, 1\]"),
        ({"exact_limit": 40}, "memory doubles"),
        ({"num_permutations": 5}, "even integer"),
        ({"num_permutations": 2}, "at least 4"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 1.5}, "seed = 1.5"),
    ],
)
def test_bad_options(options, message):
    for call in (shapley_values, gcpo_advantages):
        with pytest.raises(ValueError, match=message):
            call(UNIT_GD, ONES_G, **options)


def test_all_three_take_the_whole_set_of_options():
    options = {"value": "det", "c": 2.0, "reward_map": "binary", "normalize": "mean", "floor": 0.1, "credit_mix": 0.5}
    total = team_value(UNIT_GD, ONES_G, np.ones((1, 3)), **options)[0]
    assert total == pytest.approx(26)
    assert shapley_values(UNIT_GD, ONES_G, **options) == pytest.approx([26 / 3] * 3)
    assert gcpo_advantages(UNIT_GD, ONES_G, **options) == pytest.approx([0] * 3, abs=1e-12)

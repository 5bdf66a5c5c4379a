"""Paired differences over seeds."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gcpo.evaluate.paired import paired_difference


def test_pairs_cancel_what_a_seed_does_to_both():
    """Seeds that move both methods by 1 leave a constant difference without any spread."""
    found = paired_difference([1.2, 2.2, 0.2], [1.0, 2.0, 0.0])
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.2, 0.2))


def test_two_seeds_by_hand():
    """Resamples of (0, 1): means 0, 1/2, 1/2, 1; the middle half of the four."""
    found = paired_difference([0.0, 1.0], [0.0, 0.0], level=0.5)
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.375, 0.625))


def test_many_seeds_give_the_normal_interval():
    differences = np.random.default_rng(1).normal(0.3, 1.0, 200)
    found = paired_difference(differences.tolist(), [0.0] * 200)
    error = 1.96 * differences.std() / np.sqrt(200)
    assert found.low == pytest.approx(found.mean - error, abs=0.02)
    assert found.high == pytest.approx(found.mean + error, abs=0.02)
    assert found == paired_difference(differences.tolist(), [0.0] * 200)

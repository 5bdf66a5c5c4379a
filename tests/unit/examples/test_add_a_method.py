"""The example of a method of one's own: does what it says, trains like any other, and is as short as promised."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_gcpo.methods import resolve
from tests.unit.methods.test_credit import inputs
from tests.unit.methods.world import make_world, take_step

FILE = Path(__file__).parents[3] / "examples/add_a_method/median.py"


@pytest.fixture(scope="module")
def median():
    spec = importlib.util.spec_from_file_location("median", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def in_the_table(median):
    from megatron_gcpo.methods import METHODS

    table = {**METHODS, "median": median.METHOD}
    with mock.patch("megatron_gcpo.methods.resolve.METHODS", table):
        yield


def test_it_is_short():
    assert len(FILE.read_text(encoding="utf-8").splitlines()) < 60


def test_the_typical_answer_is_paid_nothing(median):
    credit = median.credit(inputs([1.0, 1.0, 1.0, 0.0]), median.MedianOptions(scale=2.0))
    assert credit.advantages_G.tolist() == [0, 0, 0, -2]
    assert median.credit(inputs([1.0, 0.0]), median.MedianOptions()).advantages_G.tolist() == [0.5, -0.5]


@pytest.mark.usefixtures("in_the_table")
def test_it_trains_like_any_other():
    """A step of it, with token credit and a KL term that it has never heard of."""
    world = make_world()
    taken = take_step("median", world, token_credit=["cw"], loss={"kl_coef": 0.1, "kl_controller": "expo"})
    assert taken.gradient.abs().max() > 1e-3
    assert set(taken.metrics) >= {"kl_coef", "cw_sigma"}
    orders = [[3, 1, 0, 2]] * 4
    torch.testing.assert_close(
        take_step("median", world.permuted(orders)).gradient, take_step("median", world).gradient
    )


@pytest.mark.usefixtures("in_the_table")
def test_its_options_are_checked():
    with pytest.raises(ValueError, match=r"method\.scal is not a field; did you mean method\.scale\?"):
        resolve({"name": "median", "scal": 1})

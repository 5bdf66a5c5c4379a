"""The two-phase loss of every method has the gradient of its objective written out in one piece."""

from __future__ import annotations

import pytest
import torch

from megatron_gcpo.methods import METHODS
from tests.unit.methods.direct import objective
from tests.unit.methods.test_contract import world_for
from tests.unit.methods.world import make_world, take_step

STATES = {"papo": {"papo": {"entropy": 1.5}}}
VALUE_DIFFERS = {"conspo", "rspo", "cispo", "ed_grpo", "ed_idpo"}
"""The two-phase form is linear in the log-probabilities: same gradient, another value."""


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("name", METHODS)
def test_gradient_is_that_of_the_direct_objective(name, seed):
    drift = 0.0 if not (world_for(name).current - world_for(name).start).any() else 0.25
    world = make_world(drift=drift, seed=seed)
    current = world.current.clone().requires_grad_()
    loss = objective(name, world, current, progress=0.5)
    (expected,) = torch.autograd.grad(loss, current)
    taken = take_step(name, world, step=1, total_steps=3, states=STATES.get(name))
    torch.testing.assert_close(taken.gradient, expected, rtol=3e-6, atol=3e-7)
    if name not in VALUE_DIFFERS:
        assert taken.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)

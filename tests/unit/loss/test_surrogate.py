"""The clipped surrogate: values, where the gradient may flow, and what the metrics count."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron_gcpo.loss import ppo_clip

LOW, HIGH = 0.2, 0.28


def run(ratio: float, advantage: float, dual_clip: float | None = None):
    """(loss, d loss / d logp, metrics) of one token in float64."""
    logprob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0 - math.log(ratio)], dtype=torch.float64)
    loss_T, metrics = ppo_clip(logprob, old, torch.tensor([advantage], dtype=torch.float64), LOW, HIGH, dual_clip)
    (gradient,) = torch.autograd.grad(loss_T.sum(), logprob)
    return loss_T.item(), gradient.item(), {name: value.item() for name, value in metrics.items()}


@settings(max_examples=75, deadline=None)
@given(st.floats(0.6, 1.5) | st.floats(0.05, 20), st.floats(-3, 3), st.sampled_from([None, 1.5, 3.0]))
@example(ratio=0.75, advantage=-1.0, dual_clip=None)  # between 1 - HIGH and 1 - LOW
@example(ratio=1.25, advantage=1.0, dual_clip=None)  # between 1 + LOW and 1 + HIGH
def test_equals_the_case_table(ratio, advantage, dual_clip):
    """A > 0: the gain is A min(rho, 1 + high). A < 0: |A| max(rho, 1 - low) is lost, at most |A| dual_clip. The
    derivative of rho by logp is rho: the gradient is -A rho where rho itself is in the gain, 0 where a bound is."""
    assume(all(abs(ratio - kink) > 1e-9 for kink in (1 - LOW, 1 + HIGH, 1.5, 3.0)))
    if advantage > 0:
        effective, free = min(ratio, 1 + HIGH), ratio <= 1 + HIGH
    else:
        effective, free = max(ratio, 1 - LOW), ratio >= 1 - LOW
        if dual_clip is not None and effective > dual_clip:
            effective, free = dual_clip, False
    loss, gradient, metrics = run(ratio, advantage, dual_clip)
    assert loss == pytest.approx(-advantage * effective, rel=1e-9, abs=1e-12)
    assert gradient == pytest.approx(-advantage * ratio if free else 0.0, rel=1e-9, abs=1e-12)
    assert metrics["ratio"] == pytest.approx(ratio, rel=1e-9)
    if abs(advantage) > 1e-9:
        assert metrics["clip_fraction"] == float(not free)


def test_dual_clip_is_counted_on_its_own():
    assert run(5.0, -1.0, 3.0)[2] | {"old_kl": 0} == {
        "ratio": pytest.approx(5.0),
        "clip_fraction": 1.0,
        "dual_clip_fraction": 1.0,
        "old_kl": 0,
    }
    assert run(0.5, -1.0, 3.0)[2]["dual_clip_fraction"] == 0.0
    assert run(0.5, -1.0, 3.0)[2]["clip_fraction"] == 1.0


def test_on_policy_gradient_is_reinforce():
    logprobs_T = torch.tensor([-0.3, -2.0, -0.7], requires_grad=True)
    advantages_T = torch.tensor([1.5, -0.5, 0.0])
    loss_T, metrics = ppo_clip(logprobs_T, logprobs_T.detach(), advantages_T, LOW, HIGH)
    loss_T.sum().backward()
    torch.testing.assert_close(logprobs_T.grad, -advantages_T)
    assert metrics["ratio"].tolist() == [1, 1, 1]
    assert metrics["old_kl"].tolist() == [0, 0, 0]


def test_gradient_reaches_the_current_policy_only():
    inputs = [torch.randn(4, requires_grad=True) for _ in range(3)]
    loss_T, metrics = ppo_clip(*inputs, LOW, HIGH)
    loss_T.sum().backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is None
    assert inputs[2].grad is None
    assert not any(value.requires_grad for value in metrics.values())


def test_old_kl_is_the_k3_estimate_from_the_old_policy():
    """Mean of rho - 1 - log rho over tokens drawn from the old policy is KL(old || new)."""
    old = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    new = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    _, metrics = ppo_clip(new.log(), old.log(), torch.zeros(3), LOW, HIGH)
    assert (old * metrics["old_kl"]).sum().item() == pytest.approx((old * (old / new).log()).sum().item())


def test_far_ratios_stay_finite():
    logprobs_T = torch.tensor([-1.0, -200.0], requires_grad=True)
    loss_T, _ = ppo_clip(logprobs_T, torch.tensor([-200.0, -1.0]), torch.tensor([-1.0, 1.0]), LOW, HIGH)
    loss_T.sum().backward()
    assert torch.isfinite(loss_T).all()
    assert torch.isfinite(logprobs_T.grad).all()

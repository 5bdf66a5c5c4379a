"""KL estimators over a small vocabulary where every expectation is a sum."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_gcpo.loss import KL_ESTIMATORS, k1, k2, k3

REFERENCE = torch.tensor([0.1, -0.4, 0.8, 0.0, -1.2], dtype=torch.float64).log_softmax(0)


def policy() -> torch.Tensor:
    return torch.tensor([0.5, -0.9, 0.3, 0.6, -1.0], dtype=torch.float64, requires_grad=True)


def mean_gradient(estimator) -> torch.Tensor:
    """Expectation over sampled tokens of the estimator's gradient with respect to the logits."""
    logits = policy()
    probs = logits.softmax(0).detach()
    return sum(
        p * torch.autograd.grad(estimator(logits.log_softmax(0)[i], REFERENCE[i]), logits)[0]
        for i, p in enumerate(probs)
    )


def divergence_gradient(forward: bool) -> torch.Tensor:
    """Gradient of KL(ref || pi) if forward, else of KL(pi || ref)."""
    logits = policy()
    logprobs = logits.log_softmax(0)
    kl = (REFERENCE.exp() * (REFERENCE - logprobs)) if forward else (logprobs.exp() * (logprobs - REFERENCE))
    return torch.autograd.grad(kl.sum(), logits)[0]


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(estimator):
    logprobs = policy().detach().log_softmax(0)
    exact = (logprobs.exp() * (logprobs - REFERENCE)).sum()
    torch.testing.assert_close((logprobs.exp() * estimator(logprobs, REFERENCE)).sum(), exact)


def test_k2_is_the_divergence_to_second_order():
    """With pi = ref (1 + eps u), sum ref u = 0: both are eps^2 / 2 sum ref u^2 + O(eps^3)."""
    probs = REFERENCE.exp()
    u = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0], dtype=torch.float64)
    u = u - (probs * u).sum()
    for eps in (1e-2, 1e-3):
        logprobs = (probs * (1 + eps * u)).log()
        exact = (logprobs.exp() * (logprobs - REFERENCE)).sum()
        estimate = (logprobs.exp() * k2(logprobs, REFERENCE)).sum()
        assert estimate.item() == pytest.approx(exact.item(), rel=2 * eps)


def test_k1_has_no_mean_gradient():
    torch.testing.assert_close(mean_gradient(k1), torch.zeros(5, dtype=torch.float64))


def test_k2_has_the_gradient_of_the_divergence_it_names():
    torch.testing.assert_close(mean_gradient(k2), divergence_gradient(forward=False))


def test_k3_has_the_gradient_of_the_other_direction():
    torch.testing.assert_close(mean_gradient(k3), divergence_gradient(forward=True))


def test_k3_is_never_negative_and_zero_only_at_equality():
    d = torch.arange(-50, 51, dtype=torch.float64) / 10
    values = k3(d, torch.zeros_like(d))
    assert (values >= 0).all()
    assert values[50] == 0
    assert (values[d != 0] > 0).all()


def test_k3_far_from_the_reference_is_finite_and_pulls_back():
    """d = -100: the gradient d k3 / d logp = 1 - r stays negative, towards the reference, with r held at e^20."""
    logprobs_T = torch.tensor([-101.0], requires_grad=True)
    value = k3(logprobs_T, torch.tensor([-1.0]))
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert logprobs_T.grad.item() == pytest.approx(1 - math.exp(20), rel=1e-6)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS.values())
def test_no_gradient_into_the_reference(estimator):
    reference_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    estimator(torch.tensor([-1.5, -0.5], requires_grad=True), reference_T).sum().backward()
    assert reference_T.grad is None

"""What every method minimizes, token by token."""

from __future__ import annotations

import pytest
import torch

from megatron_gcpo.loss import k2, k3, ppo_clip
from megatron_gcpo.methods import METHODS, resolve
from megatron_gcpo.methods.base import clipped_surrogate
from megatron_gcpo.types import TokenBatch, TokenStats

LOGPROBS = torch.tensor([0.0, -0.5, -2.0, -1.0, -0.2])
OLD = torch.tensor([0.0, -0.9, -1.9, -0.2, -0.7])
ADVANTAGES = torch.tensor([0.0, 1.0, 1.0, -1.0, -1.0])


def make(**fields) -> tuple[TokenStats, TokenBatch]:
    stats = TokenStats(logprobs_T=LOGPROBS.clone().requires_grad_(), entropy_T=torch.zeros(5))
    batch = TokenBatch(
        tokens_T=torch.zeros(5, dtype=torch.int64),
        cu_seqlens_N1=torch.tensor([0, 5]),
        mask_T=(ADVANTAGES != 0).float(),
        advantages_T=ADVANTAGES,
        group_N=torch.zeros(1, dtype=torch.int64),
        **fields,
    )
    return stats, batch


CLIPPED = [name for name, method in METHODS.items() if method.policy_loss is clipped_surrogate]


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_surrogate_with_the_methods_own_range(name):
    stats, batch = make(old_logprobs_T=OLD)
    method, options = resolve({"name": name, "loss": {"kl_coef": 0.0, "kl_controller": "fixed", "entropy_coef": 0.0}})
    loss_T, metrics = method.token_loss(stats, batch, options)
    expected_T, _ = ppo_clip(LOGPROBS, OLD, ADVANTAGES, 0.2, 0.28 if name in ("dapo", "papo") else 0.2)
    torch.testing.assert_close(loss_T, expected_T)
    assert set(metrics) == {"ratio", "clip_fraction", "old_kl"}


@pytest.mark.parametrize("name", CLIPPED)
def test_without_old_logprobs_the_gradient_is_reinforce(name):
    stats, batch = make()
    method, options = resolve({"name": name, "loss": {"kl_coef": 0.0, "kl_controller": "fixed"}})
    loss_T, metrics = method.token_loss(stats, batch, options)
    loss_T.sum().backward()
    torch.testing.assert_close(stats.logprobs_T.grad, -ADVANTAGES)
    assert metrics["clip_fraction"].sum() == 0


@pytest.mark.parametrize(("estimator", "function"), [("k2", k2), ("k3", k3)])
def test_kl_term_is_added(estimator, function):
    reference_T = torch.tensor([0.0, -0.4, -2.2, -1.5, -0.1])
    stats, batch = make(old_logprobs_T=OLD, ref_logprobs_T=reference_T)
    method, plain = resolve({"name": "grpo"})
    _, options = resolve({"name": "grpo", "loss": {"kl_coef": 0.04, "kl_estimator": estimator}})
    with_kl_T, metrics = method.token_loss(stats, batch, options)
    without_T, _ = method.token_loss(stats, batch, plain)
    torch.testing.assert_close(with_kl_T - without_T, 0.04 * function(LOGPROBS, reference_T))
    torch.testing.assert_close(metrics["ref_kl"], function(LOGPROBS, reference_T))
    assert not metrics["ref_kl"].requires_grad
    assert method.needs_for(options) == {"ref_logprobs"}
    assert method.needs_for(plain) == frozenset()


def test_kl_without_a_reference_is_refused():
    stats, batch = make()
    method, options = resolve({"name": "grpo", "loss": {"kl_coef": 0.04}})
    with pytest.raises(ValueError, match="no reference log-probabilities"):
        method.token_loss(stats, batch, options)


def test_dual_clip_reaches_the_loss():
    stats, batch = make(old_logprobs_T=OLD - 2 * (ADVANTAGES < 0))
    method, options = resolve({"name": "gcpo", "loss": {"dual_clip": 3.0}})
    loss_T, metrics = method.token_loss(stats, batch, options)
    assert loss_T[3:].tolist() == pytest.approx([3.0, 3.0])  # ratios e^1.2 and e^2.5
    assert metrics["dual_clip_fraction"].tolist() == [0, 0, 0, 1, 1]

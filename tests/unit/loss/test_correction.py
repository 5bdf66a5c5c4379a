"""Train/rollout correction against enumerated expectations and hand-made rows."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from megatron_gcpo.config import validate
from megatron_gcpo.config.records import CORRECTION_BOUNDS as BOUNDS
from megatron_gcpo.loss import correction
from megatron_gcpo.loss.correction import MOMENTS, correct
from megatron_gcpo.loss.surrogate import ppo_clip
from megatron_gcpo.types import TokenBatch

KINDS = tuple(kind for kind in BOUNDS if kind != "none")


def batch(old: list[list[float]], rollout: list[list[float]], advantages: list[float] | None = None) -> TokenBatch:
    """Rows of one prompt token and these completion log-probs."""
    lengths = [1 + len(row) for row in old]
    mask_T = torch.cat([torch.tensor([0.0, *[1.0] * (n - 1)]) for n in lengths])
    paid = [1.0] * len(old) if advantages is None else advantages

    def flat(rows: list[list[float]]) -> torch.Tensor:
        # what stands off the mask must not matter
        return torch.cat([torch.tensor([7.0, *row]) for row in rows])

    return TokenBatch(
        tokens_T=torch.arange(sum(lengths)),
        cu_seqlens_N1=torch.tensor([0, *np.cumsum(lengths).tolist()]),
        mask_T=mask_T,
        advantages_T=torch.tensor(paid).repeat_interleave(torch.tensor(lengths)) * mask_T,
        group_N=torch.zeros(len(old), dtype=torch.int64),
        old_logprobs_T=flat(old),
        rollout_logprobs_T=flat(rollout).add(torch.where(mask_T > 0, 0.0, 3.0)),
    )


def corrected(
    part: TokenBatch, kind: str, low: float | None = None, high: float | None = None, kappa: float = 3e-3
) -> tuple[torch.Tensor, dict[str, float]]:
    own_low, own_high = BOUNDS[kind]
    bounds = {"low": own_low if low is None else low, "high": own_high if high is None else high}
    batch, seen = correct(part, kind, **bounds, kappa=kappa, sum_over_replicas=lambda sums: sums)
    assert batch.correction_T is not None
    return batch.correction_T, seen


def rows_of(weights_T: torch.Tensor, part: TokenBatch) -> list[list[float]]:
    """Weights of the completion tokens, row by row."""
    edges = part.cu_seqlens_N1.tolist()
    return [weights_T[a + 1 : b].tolist() for a, b in pairwise(edges)]


LN2 = math.log(2)
OLD = [[-1.0, -1.0], [-0.5, -2.0, -0.1], [-1.0]]
ROLLOUT = [[-1.0 - LN2, -1.0 + LN2], [-0.5 - 3 * LN2, -2.0, -0.1], [-1.0 - LN2 / 2]]
"""Ratios (2, 1/2), (8, 1, 1), (sqrt 2): products 1, 8, sqrt 2; geometric means 1, 2, sqrt 2."""


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("token_tis", None, None, [[2, 0.5], [2, 1, 1], [2**0.5]]),
        ("token_tis", 0.75, 4, [[2, 0.75], [4, 1, 1], [2**0.5]]),
        ("sequence_tis", None, None, [[1, 1], [2, 2, 2], [2**0.5]]),
        ("sequence_tis", None, 100, [[1, 1], [8, 8, 8], [2**0.5]]),
        ("masked", 0.4, None, [[2, 0.5], [0, 1, 1], [2**0.5]]),
        ("masked", 0.6, 1.9, [[0, 0], [0, 1, 1], [2**0.5]]),
        ("geometric", None, None, [[1, 1], [0, 0, 0], [0]]),
        ("geometric", None, 1.9, [[1, 1], [0, 0, 0], [1]]),
    ],
)
def test_weights_by_hand(kind: str, low: float | None, high: float | None, expected: list[list[float]]) -> None:
    part = batch(OLD, ROLLOUT)
    weights_T, seen = corrected(part, kind, low, high)
    assert weights_T.dtype == torch.float32
    assert not weights_T[part.mask_T == 0].any()
    for got, wanted in zip(rows_of(weights_T, part), expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-6)
    flat = [w for row in expected for w in row]
    assert seen["masked_share"] == pytest.approx(np.mean([w == 0 for w in flat]))


def test_diagnostics_by_hand() -> None:
    _, seen = corrected(batch(OLD, ROLLOUT), "token_tis", 0.75, 4)
    ratios = np.array([2, 0.5, 8, 1, 1, 2**0.5])
    rows = np.array([1, 8, 2**0.5])
    assert seen["kl_k1"] == pytest.approx(-np.log(ratios).mean())
    assert seen["kl_k3"] == pytest.approx((ratios - 1 - np.log(ratios)).mean())
    assert seen["ess_token"] == pytest.approx(ratios.sum() ** 2 / (6 * (ratios**2).sum()))
    assert seen["ess_sequence"] == pytest.approx(rows.sum() ** 2 / (3 * (rows**2).sum()))
    assert seen["cut_share"] == pytest.approx(2 / 6)
    assert [seen["ratio_p01"], seen["ratio_p99"]] == pytest.approx([0.5, 8])
    assert seen["ratio_p50"] in (pytest.approx(1), pytest.approx(2**0.5))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_policies_leave_the_gradient_alone_bit_for_bit(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [(-3 * torch.rand(n, generator=generator)).tolist() for n in (5, 1, 9)]
    part = batch(rows, rows, [0.3, -1.7, 0.9])
    part = replace(part, rollout_logprobs_T=part.old_logprobs_T)
    weights_T, seen = corrected(part, kind)
    assert torch.equal(weights_T, part.mask_T)
    assert (seen["ess_token"], seen["ess_sequence"], seen["kl_k3"]) == (1.0, 1.0, 0.0)
    assert seen["cut_share"] == seen["masked_share"] == 0
    gradients = []
    for factor_T in (torch.ones_like(weights_T), weights_T):
        assert part.old_logprobs_T is not None
        logprobs_T = (part.old_logprobs_T + 0.05).requires_grad_()
        loss_T, _ = ppo_clip(logprobs_T, part.old_logprobs_T, part.advantages_T, 0.2, 0.2)
        (loss_T * factor_T).sum().backward()
        gradients.append(logprobs_T.grad)
    assert torch.equal(*gradients)


def sampler(size: int = 12, gap: float = 0.8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TokenBatch]:
    """(pi, mu, f, one row for each token of a vocabulary): a categorical policy and one with perturbed logits."""
    generator = torch.Generator().manual_seed(3)
    logits_V = torch.randn(size, generator=generator, dtype=torch.float64)
    other_V = logits_V + gap * torch.randn(size, generator=generator, dtype=torch.float64)
    values_V = torch.randn(size, generator=generator, dtype=torch.float64)
    old_V, rollout_V = logits_V.log_softmax(-1), other_V.log_softmax(-1)
    part = batch([[x] for x in old_V.tolist()], [[x] for x in rollout_V.tolist()], values_V.tolist())
    return old_V.exp(), rollout_V.exp(), values_V, part


@pytest.mark.parametrize("kind", ["token_tis", "sequence_tis", "masked"])
def test_untruncated_weights_are_unbiased(kind: str) -> None:
    """E_mu[w f] = E_pi[f], by summing over the whole vocabulary; without weights it is not."""
    pi_V, mu_V, values_V, part = sampler()
    weights_V = corrected(part, kind, 1e-9, math.inf)[0][part.mask_T > 0].double()
    wanted = float((pi_V * values_V).sum())
    assert float((mu_V * weights_V * values_V).sum()) == pytest.approx(wanted, abs=1e-6)
    assert abs(float((mu_V * values_V).sum()) - wanted) > 0.02


@pytest.mark.parametrize("high", [1.2, 2.0])
def test_the_bias_of_truncation_is_bounded_by_the_mass_cut_off(high: float) -> None:
    """|E_mu[w f] - E_pi[f]| <= max|f| sum (pi - C mu)+ and second moment of w at most C."""
    pi_V, mu_V, values_V, part = sampler()
    weights_V = corrected(part, "token_tis", None, high)[0][part.mask_T > 0].double()
    bias = abs(float((mu_V * weights_V * values_V).sum() - (pi_V * values_V).sum()))
    mass = float((pi_V - high * mu_V).clamp(min=0).sum())
    assert 0 < bias <= float(values_V.abs().max()) * mass + 1e-6
    assert float((mu_V * weights_V.square()).sum()) <= high


def test_adaptive_weights_lie_between_none_and_truncated() -> None:
    part = batch(OLD, ROLLOUT)
    truncated_T = corrected(part, "token_tis")[0]
    weights_T, seen = corrected(part, "ais")
    share = seen["blend"]
    assert 0 < share < 1
    torch.testing.assert_close(weights_T, part.mask_T + share * (truncated_T - part.mask_T))
    for whole in (0.0, 1.0):
        direct_T = correction.weights("ais", part, 0.0, 2.0, blend=whole)
        torch.testing.assert_close(direct_T, truncated_T if whole else part.mask_T)


def sums(**changes: float) -> dict[str, float]:
    plain = dict.fromkeys(MOMENTS, 0.0) | {"tokens": 100.0, "k3": 1.0, "rows": 10.0, "row_ratio": 10.0}
    return plain | {"row_ratio_squared": 10.0, "signal": 50.0, "weighted_signal": 50.0} | changes


def test_adaptive_share_closed_form_and_monotone() -> None:
    """Up with the divergence, down with the loss of effective samples and with the growth of the gradient's variance."""
    assert correction.blend(sums(), kappa=0.01) == pytest.approx(1 - math.exp(-1))
    assert correction.blend(sums(k3=0.0), kappa=0.01) == 0.0
    assert correction.blend(sums(k3=1e9), kappa=0.01) == 1.0
    by_gap = [correction.blend(sums(k3=k3), kappa=0.01) for k3 in (0.1, 0.5, 1.0, 4.0)]
    assert by_gap == sorted(by_gap)
    by_ess = [correction.blend(sums(row_ratio_squared=s), kappa=0.01) for s in (10.0, 20.0, 50.0)]
    assert by_ess == pytest.approx([by_ess[0], by_ess[0] / 2, by_ess[0] / 5])
    by_growth = [correction.blend(sums(weighted_signal=s), kappa=0.01) for s in (10.0, 50.0, 100.0)]
    assert by_growth == pytest.approx([by_ess[0], by_ess[0], by_ess[0] / 2])
    assert correction.blend(dict.fromkeys(MOMENTS, 0.0), kappa=0.01) == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_weights_do_not_depend_on_how_the_batch_is_cut(kind: str) -> None:
    """Replicas and the order of rows: what couples the batch is summed, the rest belongs to a row."""
    generator = torch.Generator().manual_seed(1)
    sizes = (3, 1, 6, 2, 8)
    old = [(-2 * torch.rand(n, generator=generator)).tolist() for n in sizes]
    rollout = [[x + 0.02 * float(torch.randn((), generator=generator)) for x in row] for row in old]
    whole = batch(old, rollout, [1.0, -1.0, 0.5, 2.0, -0.3])
    weights_T, seen = corrected(whole, kind)
    order = [3, 0, 4, 2, 1]
    replicas = [whole.rows(order[:2]), whole.rows(order[2:])]
    low, high = BOUNDS[kind]
    other = correction.moments(kind, replicas[1], low, high)
    own, own_seen = correct(
        replicas[0], kind, low=low, high=high, kappa=3e-3, sum_over_replicas=lambda sums: sums + other
    )
    expected = replace(whole, correction_T=weights_T).rows(order[:2])
    torch.testing.assert_close(own.correction_T, expected.correction_T, rtol=1e-6, atol=0)
    for name in ("kl_k1", "kl_k3", "ess_token", "ess_sequence", "cut_share", "masked_share"):
        assert own_seen[name] == pytest.approx(seen[name], rel=1e-9), name


def test_kind_none_only_looks() -> None:
    part = batch(OLD, ROLLOUT)
    same, seen = correct(part, "none", low=0.0, high=math.inf, kappa=1e-3, sum_over_replicas=lambda sums: sums)
    assert same is part
    assert seen["kl_k3"] > 0
    assert seen["cut_share"] == seen["masked_share"] == 0


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_nothing_to_train_is_no_error(kind: str) -> None:
    empty = batch(OLD, ROLLOUT).rows([])
    low, high = BOUNDS[kind]
    same, seen = correct(empty, kind, low=low, high=high, kappa=1e-3, sum_over_replicas=lambda sums: sums)
    assert "kl_k1" not in seen
    assert (same.correction_T is None) == (kind == "none")


def test_extreme_log_probs_stay_finite() -> None:
    part = batch([[-1e4, -0.1], [-0.1] * 40], [[-0.1, -1e4], [-30.0] * 40])
    for kind in KINDS:
        weights_T, seen = corrected(part, kind)
        assert weights_T.isfinite().all()
        assert all(math.isfinite(v) for v in seen.values())


def config(**sections: dict[str, Any]) -> Any:
    return validate(
        {
            "model": {"hf_config": {"model_type": "qwen3"}, "tokenizer": "task", "dtype": "fp32"},
            "data": {"train": {"kind": "task", "name": "addition"}, "max_prompt_tokens": 24},
            "train": {"optimizer": {"lr": 1e-3}, "max_tokens_per_micro_batch": 256},
            **{"rollout": {"max_new_tokens": 64}, **sections},
        },
        origin="r",
    )


@pytest.mark.parametrize(
    ("rollout", "kind", "expected"),
    [
        ({}, "auto", "none"),
        ({"max_policy_lag": 1}, "auto", "token_tis"),
        ({"max_policy_lag": 1}, "none", "none"),
        ({}, "masked", "masked"),
    ],
)
def test_auto_corrects_what_has_a_gap(rollout: dict[str, Any], kind: str, expected: str) -> None:
    made = config(rollout={"max_new_tokens": 64, **rollout}, correction={"kind": kind})
    assert made.correction_kind == expected


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"correction": {"kind": "token_tis", "low": 1.5}}, r"correction\.low 1\.5 and correction\.high 2 must have 1"),
        (
            {"rollout": {"max_new_tokens": 64, "max_policy_lag": 1, "top_p": 0.9}},
            r"correction\.kind token_tis compares .* rollout\.top_p draws from a part of it",
        ),
        (
            {"rollout": {"max_new_tokens": 64, "max_policy_lag": 5}, "run": {"steps": 5}},
            r"max_policy_lag 5 is as long as the run of 5 steps",
        ),
    ],
)
def test_what_cannot_be_corrected_is_refused(sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        config(**sections)


@pytest.mark.parametrize("kind", sorted(correction.ROW_LOCAL))
def test_in_the_update_are_the_weights_of_a_pass_before_it(kind: str) -> None:
    """With one update a step its own forward pass is the old policy: same weights, same means, no gradient through them."""
    made = batch(OLD, ROLLOUT)
    assert made.old_logprobs_T is not None
    current_T = made.old_logprobs_T.clone().requires_grad_()
    low, high = BOUNDS[kind]
    weight_T, seen = correction.in_update(kind, replace(made, old_logprobs_T=None), current_T, low, high)
    assert torch.equal(weight_T, correction.weights(kind, made, low, high))
    assert not weight_T.requires_grad
    sums = dict(zip(MOMENTS, correction.moments(kind, made, low, high).tolist(), strict=True))
    for name, total in (("kl_k1", "k1"), ("kl_k3", "k3"), ("ratio", "ratio"), ("ratio_squared", "ratio_squared")):
        mean = float((seen[f"correction_{name}"] * made.mask_T).sum())
        assert mean == pytest.approx(sums[total], rel=1e-4, abs=1e-5)

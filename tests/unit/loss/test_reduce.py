"""Token weights: the sum of weights x losses is the loss that each mode names, however the batch is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gcpo.loss import Totals, count, nll, token_weights
from megatron_gcpo.types import TokenBatch

MAX_TOKENS = 7
MODES = ["token_mean", "sequence_mean_token_mean", "sequence_mean_fixed_length", "prompt_balanced"]


def make_batch(prompts_and_completions, groups) -> TokenBatch:
    """Rows of (prompt length, completion length); completions are trained."""
    mask = [x for p, c in prompts_and_completions for x in [0.0] * p + [1.0] * c]
    lengths = [p + c for p, c in prompts_and_completions]
    return TokenBatch(
        tokens_T=torch.arange(len(mask)),
        cu_seqlens_N1=torch.tensor([0, *np.cumsum(lengths)]),
        mask_T=torch.tensor(mask),
        advantages_T=torch.zeros(len(mask)),
        group_N=torch.tensor(groups),
    )


@st.composite
def batches(draw):
    """Up to 5 groups of 1..4 rows, group numbers with gaps, some completions empty."""
    rows, groups = [], []
    for g in range(draw(st.integers(1, 5))):
        for _ in range(draw(st.integers(1, 4))):
            rows.append((draw(st.integers(1, 3)), draw(st.integers(0, MAX_TOKENS))))
            groups.append(10 - 2 * g)
    return make_batch(rows, groups)


def token_losses(batch: TokenBatch) -> torch.Tensor:
    return torch.sin(batch.tokens_T.double() + 1)


def loss_by_definition(batch: TokenBatch, mode: str) -> float:
    """Nested Python means over groups, rows and tokens."""
    losses = token_losses(batch)
    rows = []
    for n in range(batch.num_rows):
        span = slice(int(batch.cu_seqlens_N1[n]), int(batch.cu_seqlens_N1[n + 1]))
        values = losses[span][batch.mask_T[span] > 0].tolist()
        if values:
            rows.append((int(batch.group_N[n]), values))
    if not rows:
        return 0.0
    if mode == "token_mean":
        return float(np.mean([x for _, values in rows for x in values]))
    if mode == "sequence_mean_token_mean":
        return float(np.mean([np.mean(values) for _, values in rows]))
    if mode == "sequence_mean_fixed_length":
        return float(np.mean([np.sum(values) / MAX_TOKENS for _, values in rows]))
    groups = {g: [x for h, values in rows for x in values if h == g] for g, _ in rows}
    return float(np.mean([np.mean(values) for values in groups.values()]))


def weighted_loss(batch: TokenBatch, mode: str, totals: Totals) -> float:
    weights_T = token_weights(batch, mode=mode, totals=totals, max_tokens=MAX_TOKENS)
    assert weights_T.dtype == torch.float32
    assert (weights_T[batch.mask_T == 0] == 0).all()
    return (weights_T.double() * token_losses(batch)).sum().item()


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=30, deadline=None)
@given(batches())
def test_equals_the_nested_means(mode, batch):
    assert weighted_loss(batch, mode, count(batch)) == pytest.approx(
        loss_by_definition(batch, mode), rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None)
@given(batches(), batches())
def test_replicas_add_up(mode, ours, theirs):
    """Two replicas with their own batches and summed totals give the loss of the concatenated batch."""
    a, b = count(ours), count(theirs)
    totals = Totals(
        num_tokens=a.num_tokens + b.num_tokens,
        num_rows=a.num_rows + b.num_rows,
        num_groups=a.num_groups + b.num_groups,
    )
    both = TokenBatch(
        tokens_T=torch.cat([ours.tokens_T, theirs.tokens_T]),
        cu_seqlens_N1=torch.cat([ours.cu_seqlens_N1, ours.cu_seqlens_N1[-1] + theirs.cu_seqlens_N1[1:]]),
        mask_T=torch.cat([ours.mask_T, theirs.mask_T]),
        advantages_T=torch.cat([ours.advantages_T, theirs.advantages_T]),
        group_N=torch.cat([ours.group_N, 100 + theirs.group_N]),
    )
    assert count(both) == totals
    together = weighted_loss(ours, mode, totals) + weighted_loss(theirs, mode, totals)
    assert together == pytest.approx(loss_by_definition(both, mode), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_weights_travel_with_the_rows(mode):
    """Micro-batches are rows of the weighted batch: any cut sums to the same loss."""
    batch = make_batch([(1, 3), (2, 5), (1, 1), (1, 0), (2, 2)], [0, 0, 1, 1, 1])
    weights_T = token_weights(batch, mode=mode, totals=count(batch), max_tokens=MAX_TOKENS)
    whole = (weights_T * token_losses(batch)).sum()
    parts = torch.zeros(())
    for rows in ([3, 0], [4], [2, 1]):
        spans = [torch.arange(int(batch.cu_seqlens_N1[n]), int(batch.cu_seqlens_N1[n + 1])) for n in rows]
        take = torch.cat(spans)
        parts = parts + (weights_T[take] * token_losses(batch)[take]).sum()
    torch.testing.assert_close(parts, whole, check_dtype=False)


def test_totals_leave_out_rows_and_groups_without_a_trained_token():
    assert count(make_batch([(2, 3), (2, 0), (1, 0)], [0, 0, 1])) == Totals(num_tokens=3, num_rows=1, num_groups=1)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_trained_weighs_nothing(mode):
    batch = make_batch([(2, 0), (3, 0)], [0, 1])
    assert token_weights(batch, mode=mode, totals=count(batch), max_tokens=MAX_TOKENS).tolist() == [0.0] * 5


def test_bad_mode_and_bad_length():
    batch = make_batch([(1, 1)], [0])
    with pytest.raises(ValueError, match=r"loss\.reduce is 'mean': set it to one of token_mean"):
        token_weights(batch, mode="mean", totals=count(batch), max_tokens=1)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        token_weights(batch, mode="sequence_mean_fixed_length", totals=count(batch), max_tokens=0)


def test_nll_is_cross_entropy():
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tokens_T = torch.arange(6)
    loss_T, metrics = nll(logits.log_softmax(-1)[torch.arange(6), tokens_T])
    expected_T = torch.nn.functional.cross_entropy(logits, tokens_T, reduction="none")
    torch.testing.assert_close(loss_T, expected_T)
    torch.testing.assert_close(metrics["nll"], expected_T.detach())
    assert not metrics["nll"].requires_grad
    assert loss_T.requires_grad

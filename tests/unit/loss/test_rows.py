"""Values of rows and of tokens, against plain loops."""

from __future__ import annotations

import torch

from megatron_gcpo.loss.rows import on_tokens, row_means, row_of_token, row_sums, trained_tokens
from megatron_gcpo.types import TokenBatch

LENGTHS = [3, 1, 4, 2]
MASK = [0, 1, 1, 0, 0, 1, 0, 1, 0, 0]


def batch() -> TokenBatch:
    return TokenBatch(
        tokens_T=torch.arange(10),
        cu_seqlens_N1=torch.tensor([0, 3, 4, 8, 10]),
        mask_T=torch.tensor(MASK).float(),
        advantages_T=torch.zeros(10),
        group_N=torch.zeros(4, dtype=torch.int64),
    )


def test_rows_of_tokens():
    assert row_of_token(batch()).tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3]
    assert on_tokens(torch.tensor([5.0, 6.0, 7.0, 8.0]), batch()).tolist() == [5, 5, 5, 6, 7, 7, 7, 7, 8, 8]
    assert trained_tokens(batch()).tolist() == [2, 0, 2, 0]


def test_sums_and_means_are_over_trained_tokens():
    """Rows without a trained token count 0, and the gradient stays within the mask."""
    values_T = torch.arange(10).double().requires_grad_()
    assert row_sums(values_T, batch()).tolist() == [3, 0, 12, 0]
    means_N = row_means(values_T, batch())
    assert means_N.tolist() == [1.5, 0, 6, 0]
    means_N.sum().backward()
    assert values_T.grad is not None
    assert values_T.grad.tolist() == [x / 2 for x in MASK]


def test_no_rows():
    empty = batch().rows([])
    assert row_means(torch.zeros(0), empty).shape == (0,)
    assert on_tokens(torch.zeros(0), empty).shape == (0,)

"""Between tokens and rows of a ragged batch: sums over a row's trained tokens, and values of rows on its tokens.

A micro-batch holds whole rows, so a loss may couple the tokens of one row; under context parallelism log-probabilities
arrive completed (policy.forward).
"""

from __future__ import annotations

import torch

from megatron_gcpo.types import TokenBatch


def trained_tokens(batch: TokenBatch) -> torch.Tensor:
    """[N] float64 number of trained tokens of each row."""
    return row_sums(batch.mask_T.double(), batch)


def row_sums(values_T: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[N] sums over the trained tokens of each row, in the values' dtype; 0 for rows without one. Differentiable."""
    masked_T = values_T * batch.mask_T.to(values_T.dtype)
    return values_T.new_zeros(batch.num_rows).index_add(0, row_of_token(batch), masked_T)


def row_means(values_T: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[N] means over the trained tokens of each row; 0 for rows without one. Differentiable."""
    return row_sums(values_T, batch) / trained_tokens(batch).clamp(min=1).to(values_T.dtype)


def on_tokens(values_N: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[T] each row's value on all its tokens. Differentiable."""
    return values_N[row_of_token(batch)]


def row_of_token(batch: TokenBatch) -> torch.Tensor:
    """[T] int64 row of each token."""
    rows_N = torch.arange(batch.num_rows, device=batch.mask_T.device)
    return rows_N.repeat_interleave(batch.lengths_N.to(batch.mask_T.device))

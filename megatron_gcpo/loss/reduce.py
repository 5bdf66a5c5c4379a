"""How token losses add up to the loss of the global batch: one weight per token, fixed before any micro-batch is cut.

The loss is always sum over tokens of weight x token loss, over all micro-batches and replicas. A mode is a choice of
weights, so micro-batching, packing and parallelism cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from megatron_gcpo.types import TokenBatch

Reduction = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_fixed_length", "prompt_balanced"]
"""token_mean: every trained token of the batch weighs the same (DAPO, arXiv 2503.14476).
sequence_mean_token_mean: every row weighs the same, shared by its tokens (GRPO, arXiv 2402.03300).
sequence_mean_fixed_length: every token weighs 1 / (rows x max_tokens), whatever its row's length (Dr.GRPO, 2503.20783).
prompt_balanced: every group weighs the same, shared by all its tokens.
"""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts over the global batch (all replicas); rows and groups without a trained token are not counted."""

    num_tokens: int
    """Trained tokens (mask 1)."""
    num_rows: int
    """Rows with at least one trained token: padding rows and empty completions leave the means alone."""
    num_groups: int
    """Groups with at least one trained token. Groups never span replicas, so the counts of replicas add up."""


def count(batch: TokenBatch) -> Totals:
    """The totals of this batch alone; sum the fields over replicas for the global ones."""
    trained_N = _trained_tokens(batch)
    return Totals(
        num_tokens=int(trained_N.sum()),
        num_rows=int((trained_N > 0).sum()),
        num_groups=len(batch.group_N[trained_N > 0].unique()),
    )


def token_weights(batch: TokenBatch, totals: Totals, mode: str, max_tokens: int) -> torch.Tensor:
    """[T] float32: what each token's loss is multiplied by; 0 off the mask and thus for rows without a trained token.

    batch: whole groups (``prompt_balanced`` needs every row of a group at hand). totals: of the global batch.
    mode: a ``Reduction``. max_tokens: the constant of ``sequence_mean_fixed_length``, usually rollout.max_new_tokens.
    Errors: ValueError for an unknown mode or, with fixed length, max_tokens < 1.
    """
    trained_N = _trained_tokens(batch)
    match mode:
        case "token_mean":
            divisor_N = torch.full_like(trained_N, totals.num_tokens)
        case "sequence_mean_token_mean":
            divisor_N = trained_N * totals.num_rows
        case "sequence_mean_fixed_length":
            if max_tokens < 1:
                raise ValueError(
                    f"max_tokens is {max_tokens}: sequence_mean_fixed_length divides by it, set it to 1 or more"
                )
            divisor_N = torch.full_like(trained_N, totals.num_rows * max_tokens)
        case "prompt_balanced":
            _, group_N = batch.group_N.unique(return_inverse=True)
            trained_of_group = torch.zeros_like(trained_N).index_add_(0, group_N, trained_N)
            divisor_N = trained_of_group[group_N] * totals.num_groups
        case _:
            raise ValueError(f"loss.reduce is {mode!r}: set it to one of {', '.join(get_args(Reduction))}")
    weight_N = divisor_N.clamp(min=1).reciprocal()
    return (weight_N.repeat_interleave(batch.lengths_N) * batch.mask_T).float()


def _trained_tokens(batch: TokenBatch) -> torch.Tensor:
    """[N] float64 number of trained tokens in each row."""
    cumulative = torch.zeros(len(batch.mask_T) + 1, dtype=torch.float64, device=batch.mask_T.device)
    cumulative[1:] = batch.mask_T.double().cumsum(0)
    return cumulative[batch.cu_seqlens_N1].diff()

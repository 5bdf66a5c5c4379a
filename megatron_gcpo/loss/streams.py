"""Rows of another kind beside the policy's own: one update on both, each with its own loss, weights and means.

A second stream of rows (judgements of prompts) is prepared, corrected and weighed by itself and joins the method's rows only
where the gradient is summed: L = L_policy + coef L_stream. So nothing that a method computes over groups or over the batch
sees the other stream, and the gradient of L_policy is the same with and without it.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from megatron_gcpo.types import TokenBatch, TokenStats

FILL = {"correction_T": 1, "routed_experts_T": -1}
"""What stands for a field that only the other stream has; elsewhere 0."""


def beside(batch: TokenBatch, side: TokenBatch, coef: float) -> TokenBatch:
    """The rows of both, those of ``side`` last: their loss is REINFORCE's, times ``coef``.

    Both with weights_T. Scalars are the batch's; parts_NK, which phase one has used up, is left out.
    """
    assert batch.weights_T is not None, "got rows without weights_T, expected policy.scale.weights to have run"
    assert side.weights_T is not None, "got rows without weights_T, expected policy.scale.weights to have run"
    batch = replace(batch, reinforce_T=torch.zeros(len(batch.tokens_T), dtype=torch.bool))
    side = replace(side, weights_T=coef * side.weights_T, reinforce_T=torch.ones(len(side.tokens_T), dtype=torch.bool))
    columns = {f.name: _joined(f.name, batch, side) for f in fields(TokenBatch) if f.name.endswith("_T")}
    first_group = int(batch.group_N.max()) + 1 if batch.num_rows else 0
    return TokenBatch(
        cu_seqlens_N1=torch.cat([batch.cu_seqlens_N1, batch.cu_seqlens_N1[-1] + side.cu_seqlens_N1[1:]]),
        group_N=torch.cat([batch.group_N, first_group + side.group_N]),
        scalars=batch.scalars,
        **columns,
    )


def reinforced(loss_T: torch.Tensor, stats: TokenStats, batch: TokenBatch) -> torch.Tensor:
    """[T] the method's loss, -A log pi on the rows of another stream."""
    if batch.reinforce_T is None:
        return loss_T
    return torch.where(batch.reinforce_T, -batch.advantages_T * stats.logprobs_T, loss_T)


def _joined(name: str, batch: TokenBatch, side: TokenBatch) -> Any:
    one, other = getattr(batch, name), getattr(side, name)
    if one is None and other is None:
        return None
    one = _filled(name, other, batch) if one is None else one
    return torch.cat([one, _filled(name, one, side) if other is None else other])


def _filled(name: str, like: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    return like.new_full((len(batch.tokens_T), *like.shape[1:]), FILL.get(name, 0))

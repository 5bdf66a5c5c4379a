"""Token statistics from vocabulary-parallel logits: log-probability, entropy and second moments, without gathering.

Every rank of a tensor-parallel group holds the logits of V / tp vocabulary entries. With z = logits / temperature,
m = max z (one MAX all-reduce) and e_j = exp(z_j - m), everything follows from sums over the vocabulary that share one
SUM all-reduce (derived; p = softmax z, l = log p, Z = sum e):

    logprob     = (z_y - m) - log Z                 entropy      = log Z - sum e (z - m) / Z
    sum p^2     = sum e^2 / Z^2                     sum p^2 l    = (sum e^2 (z - m) - log Z sum e^2) / Z^2

and the gradients need no communication at all:

    d logprob / dz_j = [j = y] - p_j                d entropy / dz_j   = -p_j (l_j + H)
    d S2 / dz_j      = 2 p_j (p_j - S2)             d S2l / dz_j       = p_j (p_j (2 l_j + 1) - 2 S2l - S2)

Tokens are processed in chunks, so the working memory is O(chunk_tokens * V / tp) in fp32 next to the logits and their
gradient; the backward pass recomputes p from the saved logits. The two parts of the normaliser, m and log Z, are kept
apart because their sum loses digits where logits are large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

NO_MASS = -1e4
"""exp() of it is exactly 0 in float64: a finite stand-in for z - m = -inf, whose product with p = 0 would be NaN."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What the distribution over the true vocabulary says at each position; fp32 (float64 for float64 logits)."""

    logprobs: torch.Tensor
    """[..] log p(target), natural log; -inf for a target that is no true vocabulary id."""
    entropy: torch.Tensor
    """[..] -sum p log p, nats."""
    sum_p2: torch.Tensor | None = None
    """[..] sum p^2, the collision probability; None unless asked for."""
    sum_p2_logp: torch.Tensor | None = None
    """[..] sum p^2 log p; None unless asked for."""


def token_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_tokens: int = 2048,
    second_moments: bool = False,
) -> Statistics:
    """Statistics of softmax(logits / temperature) at the targets, differentiable with respect to the logits.

    logits: [.., V / tp] this rank's columns (rank r holds ids r V/tp .. (r+1) V/tp - 1), any floating dtype.
    targets: [..] int64 global ids, the same on every rank of ``tp_group`` (None: the whole vocabulary is here).
    vocab_size: true size; columns of ids >= vocab_size are padding and take no part (their gradient is 0).
    temperature: > 0, applied to the logits as the sampler does.
    chunk_tokens: tokens worked on at once.

    Every rank returns the same values; each rank's gradient is exact for its own columns. The gradient of the logits
    has their dtype. Non-contiguous logits are copied: pass Megatron's [S, R, V / tp] as they are, with targets [S, R].
    Raises ValueError for a temperature or chunk size that is not positive.
    """
    assert targets.shape == logits.shape[:-1], f"got targets {targets.shape}, expected {logits.shape[:-1]}"
    shard = Shard.of(logits.shape[-1], vocab_size, tp_group, temperature, chunk_tokens)
    flat = logits.reshape(-1, logits.shape[-1])
    values = _LogitStatistics.apply(flat, targets.reshape(-1), shard, second_moments)
    return Statistics(**{name: v.view(targets.shape) for name, v in zip(_NAMES, values, strict=False)})


def linear_token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_tokens: int = 2048,
    second_moments: bool = False,
) -> Statistics:
    """``token_statistics(hidden @ weight.T, ...)`` whose logits only ever exist for one chunk of tokens.

    hidden: [.., H] the whole sequence on every rank.  weight: [V / tp, H] this rank's rows of the output layer.
    The gradient of ``weight`` is exact. The gradient of ``hidden`` is this rank's share: the sum over ``tp_group`` is
    the true one, as for every column-parallel layer, and the caller's entry into the layer sums it: pass hidden
    through Megatron's copy_to_tensor_model_parallel_region, or under sequence parallelism through
    gather_from_sequence_parallel_region, whose backward passes all-reduce and reduce-scatter. Inside Megatron's
    GPTModel this is what an ``output_processor`` would call.
    """
    assert targets.shape == hidden.shape[:-1], f"got targets {targets.shape}, expected {hidden.shape[:-1]}"
    shard = Shard.of(weight.shape[0], vocab_size, tp_group, temperature, chunk_tokens)
    flat = hidden.reshape(-1, hidden.shape[-1])
    values = _LinearStatistics.apply(flat, weight, targets.reshape(-1), shard, second_moments)
    return Statistics(**{name: v.view(targets.shape) for name, v in zip(_NAMES, values, strict=False)})


_NAMES = ("logprobs", "entropy", "sum_p2", "sum_p2_logp")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Which part of the vocabulary this rank holds, and how its logits become probabilities."""

    first: int
    """Global id of column 0."""
    size: int
    """Columns that are true ids (they come first); the rest is padding."""
    vocab_size: int
    temperature: float
    chunk_tokens: int
    pg: dist.ProcessGroup | None
    """None when there is nobody to reduce with."""

    @classmethod
    def of(
        cls, width: int, vocab_size: int, pg: dist.ProcessGroup | None, temperature: float, chunk_tokens: int
    ) -> Shard:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}: set rollout.temperature")
        if chunk_tokens < 1:
            raise ValueError(f"a chunk needs at least one token, got {chunk_tokens}: set train.logits_chunk_tokens")
        world = 1 if pg is None else pg.size()
        first = 0 if pg is None else pg.rank() * width
        assert 0 < vocab_size <= width * world, f"got vocab_size {vocab_size}, expected 1 to {width} columns x {world}"
        size = min(max(vocab_size - first, 0), width)
        chunk_tokens, pg = int(chunk_tokens), pg if world > 1 else None
        return cls(
            first=first, size=size, vocab_size=vocab_size, temperature=temperature, chunk_tokens=chunk_tokens, pg=pg
        )

    def chunks(self, num_tokens: int) -> list[slice]:
        return [slice(i, min(i + self.chunk_tokens, num_tokens)) for i in range(0, num_tokens, self.chunk_tokens)]

    def scaled(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """A fresh [T, size] fp32 (float64) copy of logits / temperature of the true ids, for in-place work."""
        dtype = _work_dtype(logits_TV.dtype)
        return logits_TV[:, : self.size].to(dtype, copy=True).div_(self.temperature)

    def columns(self, targets_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(column of each target here, whether it is here)."""
        column_T = targets_T - self.first
        here_T = (column_T >= 0) & (column_T < self.size)
        return torch.where(here_T, column_T, 0), here_T


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _measure(z_TV: torch.Tensor, targets_T: torch.Tensor, shard: Shard, second_moments: bool) -> torch.Tensor:
    """[4 or 6, T]: m, log Z, then the statistics in the order of _NAMES. Consumes z_TV (overwritten)."""
    max_T = z_TV.amax(-1) if shard.size else z_TV.new_full((len(z_TV),), -torch.inf)
    if shard.pg is not None:
        dist.all_reduce(max_T, dist.ReduceOp.MAX, group=shard.pg)
    z_TV.sub_(max_T[:, None])
    column_T, here_T = shard.columns(targets_T)
    if shard.size:
        target_T = torch.where(here_T, z_TV.gather(1, column_T[:, None])[:, 0], 0)
    else:
        target_T = torch.zeros_like(max_T)
    z_TV.clamp_(min=NO_MASS)
    e_TV = z_TV.exp()
    sums = [target_T, e_TV.sum(-1), z_TV.mul_(e_TV).sum(-1)]
    if second_moments:
        sums += [z_TV.mul_(e_TV).sum(-1), e_TV.square_().sum(-1)]
    sums_KT = torch.stack(sums)
    if shard.pg is not None:
        dist.all_reduce(sums_KT, group=shard.pg)
    target_T, sum_e_T, sum_ez_T = sums_KT[:3]
    logz_T = sum_e_T.log()
    known_T = (targets_T >= 0) & (targets_T < shard.vocab_size)
    rows = [max_T, logz_T, torch.where(known_T, target_T - logz_T, -torch.inf), logz_T - sum_ez_T / sum_e_T]
    if second_moments:
        sum_e2z_T, sum_e2_T = sums_KT[3:]
        rows += [sum_e2_T / sum_e_T**2, (sum_e2z_T - logz_T * sum_e2_T) / sum_e_T**2]
    return torch.stack(rows)


def _gradient(
    z_TV: torch.Tensor,
    targets_T: torch.Tensor,
    shard: Shard,
    measured_KT: torch.Tensor,
    grads: list[torch.Tensor | None],
) -> torch.Tensor:
    """[T, size] gradient of the loss with respect to the logits. Consumes z_TV (overwritten).

    grads: per statistic, d loss / d statistic [T], or None where the loss does not depend on it.
    """
    max_T, logz_T, _, *stats = (row[:, None] for row in measured_KT)
    l_TV = z_TV.sub_(max_T).sub_(logz_T).clamp_(min=NO_MASS)
    p_TV = l_TV.exp()
    g_logprob, g_entropy, g_p2, g_p2l = (None if g is None else g[:, None].to(p_TV.dtype) for g in grads)
    inner_TV = torch.zeros_like(p_TV)
    if g_p2l is not None:
        inner_TV -= g_p2l * (p_TV * (2 * l_TV + 1) - 2 * stats[2] - stats[1])
    if g_p2 is not None:
        inner_TV -= 2 * g_p2 * (p_TV - stats[1])
    if g_entropy is not None:
        inner_TV += l_TV.add_(stats[0]).mul_(g_entropy)
    if g_logprob is not None:
        inner_TV += g_logprob
    grad_TV = inner_TV.mul_(p_TV).neg_()
    if g_logprob is not None and shard.size:
        column_T, here_T = shard.columns(targets_T)
        grad_TV.scatter_add_(1, column_T[:, None], torch.where(here_T[:, None], g_logprob, 0))
    return grad_TV.div_(shard.temperature)


class _LogitStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, targets_T: torch.Tensor, shard: Shard, second_moments: bool
    ) -> tuple[torch.Tensor, ...]:
        rows = 6 if second_moments else 4
        measured_KT = logits_TV.new_empty(rows, len(logits_TV), dtype=_work_dtype(logits_TV.dtype))
        for c in shard.chunks(len(logits_TV)):
            measured_KT[:, c] = _measure(shard.scaled(logits_TV[c]), targets_T[c], shard, second_moments)
        ctx.save_for_backward(logits_TV, targets_T, measured_KT)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return tuple(row.clone() for row in measured_KT[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits_TV, targets_T, measured_KT = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        grad_TV[:, ctx.shard.size :] = 0
        for c in ctx.shard.chunks(len(logits_TV)):
            z_TV = ctx.shard.scaled(logits_TV[c])
            part = _gradient(z_TV, targets_T[c], ctx.shard, measured_KT[:, c], _chunk(grads, c))
            grad_TV[c, : ctx.shard.size] = part.to(logits_TV.dtype)
        return grad_TV, None, None, None


class _LinearStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_T: torch.Tensor,
        shard: Shard,
        second_moments: bool,
    ) -> tuple[torch.Tensor, ...]:
        rows = 6 if second_moments else 4
        measured_KT = hidden_TH.new_empty(rows, len(hidden_TH), dtype=_work_dtype(hidden_TH.dtype))
        for c in shard.chunks(len(hidden_TH)):
            z_TV = shard.scaled(hidden_TH[c] @ weight_VH.T)
            measured_KT[:, c] = _measure(z_TV, targets_T[c], shard, second_moments)
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, measured_KT)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return tuple(row.clone() for row in measured_KT[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, measured_KT = ctx.saved_tensors
        size = ctx.shard.size
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=_work_dtype(weight_VH.dtype))
        for c in ctx.shard.chunks(len(hidden_TH)):
            z_TV = ctx.shard.scaled(hidden_TH[c] @ weight_VH.T)
            part = _gradient(z_TV, targets_T[c], ctx.shard, measured_KT[:, c], _chunk(grads, c))
            grad_TV = part.to(hidden_TH.dtype)
            grad_hidden_TH[c] = grad_TV @ weight_VH[:size]
            grad_weight_VH[:size] += grad_TV.T @ hidden_TH[c]
        return grad_hidden_TH, grad_weight_VH.to(weight_VH.dtype), None, None, None


def _chunk(grads: tuple[torch.Tensor | None, ...], c: slice) -> list[torch.Tensor | None]:
    """The chunk's gradients, padded with None to the four statistics."""
    return [None if g is None else g[c] for g in grads] + [None] * (len(_NAMES) - len(grads))

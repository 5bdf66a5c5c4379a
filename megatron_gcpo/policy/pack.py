"""From a ragged TokenBatch to the dense micro-batches of the model, and back.

A micro-batch is a rectangle of R rows x S positions. With packing, several sequences share a row (their attention is
kept apart by ``segment_ids_RS``); without, every row is one padded sequence and sequences of like length sit together.
Sequences are never cut, so everything that couples the tokens of one sequence can be computed on ``MicroBatch.batch``.

Everything here is pure and deterministic: the same batch gives the same micro-batches on every rank of a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch

from megatron_gcpo.loss.rows import row_of_token
from megatron_gcpo.policy.layout import Layout, Rows
from megatron_gcpo.types import TokenBatch


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows for one forward pass, and which token each position speaks of.

    The logits at position (r, s) predict token ``source_RS[r, s]`` of ``batch``: ``token_values`` brings statistics
    computed on positions back to the token axis. An empty micro-batch has a batch without rows and one row of padding.
    """

    tokens_RS: torch.Tensor
    """[R, S] int64 input ids, 0 in padding."""
    targets_RS: torch.Tensor
    """[R, S] int64 the next token of the same sequence, 0 where there is none."""
    position_ids_RS: torch.Tensor
    """[R, S] int64 position within the sequence, 0 in padding."""
    segment_ids_RS: torch.Tensor
    """[R, S] int64, 0 in padding, 1, 2, .. for the sequences of a row from left to right."""
    source_RS: torch.Tensor
    """[R, S] int64 index into ``batch.tokens_T`` of the token that the logits here predict, -1: none."""
    batch: TokenBatch
    """The sequences of this micro-batch, whole."""
    take_T: torch.Tensor
    """[T] int64 index into the original batch's tokens of each token of ``batch``."""
    rows_N: torch.Tensor
    """[N] int64 row of the original batch of each row of ``batch``."""
    row_N: torch.Tensor
    """[N] int64 r of each sequence."""
    start_N: torch.Tensor
    """[N] int64 s of each sequence's first token."""

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return len(self.batch.tokens_T)

    @property
    def num_positions(self) -> int:
        """Tokens computed, padding included."""
        return self.tokens_RS.numel()

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on a device."""
        return replace(self, batch=replace(self.batch, **_moved(self.batch, device)), **_moved(self, device))

    def token_values(self, values_RS: torch.Tensor) -> torch.Tensor:
        """[T] values of positions as values of the tokens they predict, 0 on the first token of a sequence.

        Differentiable. On a context-parallel shard the tokens of other ranks are 0 too: a sum over the context-parallel
        group with an identity backward completes them.
        """
        assert values_RS.shape == self.source_RS.shape, f"got {values_RS.shape}, expected {self.source_RS.shape}"
        # Positions without a token share one slot past the end: a boolean mask would wait for the device.
        slot_RS = torch.where(self.source_RS < 0, self.num_tokens, self.source_RS)
        values_T1 = values_RS.new_zeros(self.num_tokens + 1)
        return values_T1.scatter(0, slot_RS.flatten(), values_RS.flatten())[:-1]


def micro_batches(
    batch: TokenBatch,
    *,
    max_tokens: int,
    packing: bool = True,
    pad_multiple: int = 1,
    sequence_multiple: int = 1,
    rows: Rows = "many",
    count: int | None = None,
) -> list[MicroBatch]:
    """Cut a batch into micro-batches of at most ``max_tokens`` computed tokens each, balanced by tokens.

    pad_multiple: S is a multiple of it: the tensor-parallel size under sequence parallelism, times 2 x the
        context-parallel size when that is above 1.
    sequence_multiple: each packed sequence begins and ends at a multiple of it: 2 x the context-parallel size when that
        is above 1 (``context_parallel_index`` cuts every sequence); divides pad_multiple.
    rows: shape of a packed micro-batch.
    count: make exactly this many, so that all replicas run the same number: the largest ``min_count`` of any replica,
        or more (interleaved pipelines want a multiple of the pipeline size). Those not needed come out empty.
        None: ``min_count``.

    Every sequence is in exactly one micro-batch. An empty micro-batch may exceed a max_tokens below pad_multiple.
    Raises ValueError for sequences that exceed max_tokens alone.
    """
    layout = _layout(max_tokens, packing, pad_multiple, sequence_multiple, rows)
    lengths = batch.lengths_N.tolist()
    least = layout.least(lengths)
    assert count is None or count >= least, f"got count={count}, expected at least min_count={least}"
    count = least if count is None else count
    parts = layout.divide(lengths, count) or layout.divide(lengths, least)
    assert parts is not None, f"got no division of lengths {lengths} into {least} micro-batches, expected one"
    parts = parts + [[]] * (count - len(parts))
    return [_assemble(batch, layout, *layout.place(part, lengths)) for part in parts]


def min_count(
    batch: TokenBatch, *, max_tokens: int, packing: bool = True, pad_multiple: int = 1, sequence_multiple: int = 1
) -> int:
    """How many micro-batches ``micro_batches`` needs for this batch (at least 1). Same arguments, same errors."""
    return _layout(max_tokens, packing, pad_multiple, sequence_multiple, "many").least(batch.lengths_N.tolist())


def gather_tokens(parts: Sequence[MicroBatch], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """[T] values on the original batch's token axis, from the ``token_values`` of each of its micro-batches."""
    assert len(parts) == len(values) > 0, f"got {len(values)} values, expected {len(parts)}, at least 1"
    values_T = torch.cat(list(values))
    take_T = torch.cat([part.take_T for part in parts]).to(values_T.device)
    return torch.zeros_like(values_T).index_copy(0, take_T, values_T)


def trained_rows(micro: MicroBatch) -> torch.Tensor:
    """[R, S] int64 row of ``micro.batch`` whose trained token the logits at each position predict, -1: none."""
    if not micro.num_tokens:
        return torch.full_like(micro.source_RS, -1)
    row_T = torch.where(micro.batch.mask_T > 0, row_of_token(micro.batch), -1)
    return torch.where(micro.source_RS >= 0, row_T[micro.source_RS.clamp(min=0)], -1)


def row_boundaries(micro: MicroBatch) -> list[int]:
    """Where the sequences of a one-row micro-batch begin and end, 0 .. S: the cu_seqlens of ragged kernels.

    Padding behind a sequence (for the last one: to the end of the row) counts as its own last positions, which a causal
    model never looks at from before. So no position is outside, and every length is a multiple of sequence_multiple.
    """
    assert len(micro.tokens_RS) == 1, f"got {len(micro.tokens_RS)} rows, expected 1: lay out with rows='one'"
    return [*(micro.start_N.tolist() or [0]), micro.num_positions]


def context_parallel_index(boundaries: Sequence[int], cp_size: int, cp_rank: int) -> torch.Tensor:
    """[S / cp] int64: the positions of a row that one context-parallel rank holds, in its order.

    boundaries: where the row's sequences begin and end (0 .. S), every length a multiple of 2 cp_size. Each sequence is
    cut in 2 cp_size chunks; rank r holds chunks r and 2 cp_size - 1 - r, so that causal attention costs all ranks the
    same. The shard is again the concatenation of its sequences.
    """
    index = [torch.zeros(0, dtype=torch.int64)]
    for begin, end in pairwise(boundaries):
        chunk, rest = divmod(end - begin, 2 * cp_size)
        assert rest == 0, f"got a sequence of {end - begin} positions, expected a multiple of {2 * cp_size}"
        for c in (cp_rank, 2 * cp_size - 1 - cp_rank):
            index.append(torch.arange(begin + c * chunk, begin + (c + 1) * chunk))
    return torch.cat(index)


def context_parallel_inverse(boundaries: Sequence[int], cp_size: int) -> torch.Tensor:
    """[S] int64 that puts the shards of ranks 0 .. cp_size - 1, concatenated along S, in order: x = shards[inverse]."""
    return torch.cat([context_parallel_index(boundaries, cp_size, r) for r in range(cp_size)]).argsort()


def context_shard(micro: MicroBatch, boundaries: Sequence[int], cp_size: int, cp_rank: int) -> MicroBatch:
    """The positions of one context-parallel rank; ``batch`` stays whole (see ``MicroBatch.token_values``)."""
    index = context_parallel_index(boundaries, cp_size, cp_rank).to(micro.tokens_RS.device)
    names = [f.name for f in fields(micro) if f.name.endswith("_RS")]
    return replace(micro, **{name: getattr(micro, name)[:, index] for name in names})


def _layout(max_tokens: int, packing: bool, pad_multiple: int, sequence_multiple: int, rows: Rows) -> Layout:
    return Layout(
        max_tokens=max_tokens,
        packing=packing,
        pad_multiple=pad_multiple,
        sequence_multiple=sequence_multiple,
        rows=rows,
    )


def _assemble(batch: TokenBatch, layout: Layout, rows: list[list[int]], width: int) -> MicroBatch:
    """The rectangle of these sequences."""
    order = [n for row in rows for n in row]
    inner = batch.rows(order)
    lengths_N = inner.lengths_N
    row_N = torch.tensor([r for r, row in enumerate(rows) for _ in row], dtype=torch.int64)
    segment_N = torch.tensor([i + 1 for row in rows for i in range(len(row))], dtype=torch.int64)
    start_N = torch.tensor(_starts(rows, lengths_N.tolist(), layout), dtype=torch.int64)

    index_T = torch.arange(len(inner.tokens_T))
    within_T = index_T - inner.cu_seqlens_N1[:-1].repeat_interleave(lengths_N)
    place_T = (row_N * width + start_N).repeat_interleave(lengths_N) + within_T
    later_T = within_T > 0
    before_T = place_T[later_T] - 1  # where the logits that predict each later token are

    def spread(values_T: torch.Tensor, at_T: torch.Tensor, fill: int = 0) -> torch.Tensor:
        flat = torch.full((len(rows) * width,), fill, dtype=torch.int64)
        flat[at_T] = values_T
        return flat.view(len(rows), width)

    return MicroBatch(
        tokens_RS=spread(inner.tokens_T, place_T),
        targets_RS=spread(inner.tokens_T[later_T], before_T),
        position_ids_RS=spread(within_T, place_T),
        segment_ids_RS=spread(segment_N.repeat_interleave(lengths_N), place_T),
        source_RS=spread(index_T[later_T], before_T, fill=-1),
        batch=inner,
        take_T=batch.cu_seqlens_N1[order].repeat_interleave(lengths_N) + within_T,
        rows_N=torch.tensor(order, dtype=torch.int64),
        row_N=row_N,
        start_N=start_N,
    )


def _starts(rows: list[list[int]], lengths: list[int], layout: Layout) -> list[int]:
    """Where each sequence begins in its row; lengths: of the sequences in reading order."""
    starts = []
    remaining = iter(lengths)
    for row in rows:
        at = 0
        for _ in row:
            starts.append(at)
            at += layout.slot(next(remaining))
    return starts


def _moved(record: MicroBatch | TokenBatch, device: torch.device | str) -> dict[str, torch.Tensor]:
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {name: v.to(device, non_blocking=True) for name, v in values.items() if isinstance(v, torch.Tensor)}

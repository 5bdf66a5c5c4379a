"""Which sequences share a micro-batch and which of those share a row: whole numbers in, whole numbers out."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

USEFUL_SHARE = 0.96
"""Rows are kept as short as this share of real tokens allows (dense attention costs R S^2)."""

Rows = Literal["many", "one"]
"""many: rows of a modest common length, for dense attention masks.  one: a single row, for ragged (thd) kernels."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The rules by which sequences become rectangles of R rows x S positions."""

    max_tokens: int
    """R x S of one micro-batch is at most this."""
    packing: bool
    """Several sequences in a row; else every row is one sequence and neighbours in length sit together."""
    pad_multiple: int
    """S is a multiple of it."""
    sequence_multiple: int
    """Each packed sequence begins and ends at a multiple of it; divides pad_multiple."""
    rows: Rows = "many"
    """Shape of a packed micro-batch."""

    def __post_init__(self) -> None:
        assert self.pad_multiple % self.sequence_multiple == 0, (
            f"got pad_multiple={self.pad_multiple}, expected a multiple of sequence_multiple={self.sequence_multiple}"
        )

    def slot(self, length: int) -> int:
        """Positions one sequence takes in a row."""
        return _round_up(length, self.sequence_multiple) if self.packing else length

    def width(self, positions: int) -> int:
        """S of a row that holds this many positions."""
        return _round_up(max(positions, 1), self.pad_multiple)

    def least(self, lengths: Sequence[int]) -> int:
        """How many micro-batches these sequences need (at least 1).

        Raises ValueError for sequences that exceed max_tokens alone.
        """
        self._refuse_too_long(lengths)
        if not self.packing:
            return len(self._buckets(_by_length(lengths), lengths, self.max_tokens))
        large = sum(2 * self.slot(length) > self.max_tokens for length in lengths)
        low, high = max(1, large, -(-sum(map(self.slot, lengths)) // self.max_tokens)), max(1, len(lengths))
        if self.divide(lengths, low) is not None:
            return low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.divide(lengths, middle) is None else (low, middle)
        return high

    def divide(self, lengths: Sequence[int], count: int) -> list[list[int]] | None:
        """The sequences of each of at most ``count`` micro-batches, balanced by tokens; None: they do not fit."""
        if self.packing:
            slots = [self.slot(length) for length in lengths]
            parts = balance(range(len(lengths)), slots, count)
            return parts if all(self.width(_total(part, slots)) <= self.max_tokens for part in parts) else None
        order = _by_length(lengths)
        if len(self._buckets(order, lengths, self.max_tokens)) > count:
            return None
        low, high = self.width(max(lengths, default=0)), self.max_tokens
        while low < high:
            middle = (low + high) // 2
            enough = len(self._buckets(order, lengths, middle)) <= count
            low, high = (low, middle) if enough else (middle + 1, high)
        return self._buckets(order, lengths, low)

    def place(self, part: Sequence[int], lengths: Sequence[int]) -> tuple[list[list[int]], int]:
        """(the sequences of each row from left to right, S) of one micro-batch."""
        slots = {n: self.slot(lengths[n]) for n in part}
        if not self.packing:
            rows = [[n] for n in part] or [[]]
        elif self.rows == "one" or not part:
            rows = [list(part)]
        else:
            rows = self._short_rows(part, slots)
        return rows, self._row_width(rows, slots)

    def _short_rows(self, part: Sequence[int], slots: Mapping[int, int]) -> list[list[int]]:
        """Rows of the shortest common length whose useful share is USEFUL_SHARE, else those with the least padding."""
        total = _total(part, slots)
        best, best_cost = [list(part)], self.width(total)
        num_rows = min(len(part), int(total / (USEFUL_SHARE * max(slots.values()))))
        while num_rows > 1:
            rows = balance(part, slots, num_rows)
            cost = num_rows * self._row_width(rows, slots)
            if cost <= self.max_tokens and total >= USEFUL_SHARE * cost:
                return rows
            if cost < best_cost:
                best, best_cost = rows, cost
            num_rows -= max(
                1, num_rows // 32
            )  # every number below 64, about 3 % steps above: hundreds of rows stay cheap
        return best

    def _row_width(self, rows: list[list[int]], slots: Mapping[int, int]) -> int:
        return self.width(max(_total(row, slots) for row in rows))

    def _buckets(self, order: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
        """Longest first, as many one-sequence rows as the budget allows: the fewest buckets of neighbours."""
        parts: list[list[int]] = [[]]
        for n in order:
            if parts[-1] and (len(parts[-1]) + 1) * self.width(lengths[parts[-1][0]]) > budget:
                parts.append([])
            parts[-1].append(n)
        return parts

    def _refuse_too_long(self, lengths: Sequence[int]) -> None:
        too_long = sorted((length for length in lengths if self.width(length) > self.max_tokens), reverse=True)
        if too_long:
            shown = ", ".join(map(str, too_long[:5])) + (", .." if len(too_long) > 5 else "")
            raise ValueError(
                f"{len(too_long)} sequence(s) do not fit into a micro-batch of {self.max_tokens} tokens: lengths "
                f"{shown} (rows are padded to multiples of {self.pad_multiple}). Set "
                f"train.max_tokens_per_micro_batch to at least {self.width(too_long[0])}, or lower "
                "rollout.max_new_tokens or data.max_prompt_tokens"
            )


def balance(items: Iterable[int], sizes: Sequence[int] | Mapping[int, int], num_bins: int) -> list[list[int]]:
    """Longest processing time first: each item, largest first, into the bin that holds least; no empty bins but one.

    Deterministic; the fullest bin is within 4/3 of the best possible (Graham 1969), and far closer with many items.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for n in sorted(items, key=lambda n: (-sizes[n], n)):
        load, b = heap[0]
        bins[b].append(n)
        heapq.heapreplace(heap, (load + sizes[n], b))
    return [part for part in bins if part] or [[]]


def _by_length(lengths: Sequence[int]) -> list[int]:
    """Longest first, ties in order."""
    return sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))


def _total(items: Iterable[int], sizes: Sequence[int] | Mapping[int, int]) -> int:
    return sum(sizes[n] for n in items)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

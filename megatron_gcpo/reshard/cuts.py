"""Cutting boxes so that they fit into buckets."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_gcpo.reshard.boxes import Box, volume

ALIGN_BYTES = 64
"""Pieces start at multiples of this, which suits every dtype and vector unit."""


def aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def capacity(bucket_bytes: int) -> int:
    """What a bucket of this size holds: a multiple of the alignment, and never nothing."""
    return max(ALIGN_BYTES, bucket_bytes // ALIGN_BYTES * ALIGN_BYTES)


def cut(box: Box, max_elements: int) -> Iterator[Box]:
    """Boxes of at most this many elements that tile this one, cut along its first dimensions. ``max_elements`` >= 1.

    Within the last dimension cuts are 8 elements apart or a multiple, so that no word of a fingerprint is cut in two.
    """
    if volume(box) <= max_elements:
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, max_elements * (stop - start) // volume(box))
    if dim == len(box) - 1 and step > 8:
        step -= step % 8
    for first in range(start, stop, step):
        yield from cut((*box[:dim], (first, min(first + step, stop)), *box[dim + 1 :]), max_elements)

"""Boxes of a tensor: one (start, stop) per dimension, in the coordinates of the whole Hugging Face tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    return math.prod(sizes(box))


def intersect(a: Box, b: Box) -> Box | None:
    """What both cover; None when that is nothing."""
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def part(tensor: torch.Tensor, origin: Box, box: Box) -> torch.Tensor:
    """The view of ``box`` in a tensor that holds ``origin``; both in the whole tensor's coordinates."""
    for dim, ((start, stop), (first, _)) in enumerate(zip(box, origin, strict=True)):
        tensor = tensor.narrow(dim, start - first, stop - start)
    return tensor

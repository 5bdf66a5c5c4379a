"""What a bucket holds, as both ends of a push describe it to each other: JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_gcpo.reshard.boxes import Box, volume
from megatron_gcpo.reshard.fingerprint import dtype_name, dtype_named


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A Hugging Face tensor on its way."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """While it travels."""
    word_bytes: int
    """Of its fingerprint (fingerprint.word_bytes)."""

    def to_json(self) -> list[Any]:
        return [self.name, list(self.shape), dtype_name(self.dtype), self.word_bytes]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> TensorSpec:
        name, shape, dtype, word_bytes = value
        return cls(name=name, shape=tuple(shape), dtype=dtype_named(dtype), word_bytes=word_bytes)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a tensor within a bucket, densely packed."""

    tensor: int
    """Index in the list of tensors."""
    box: Box
    offset: int
    """Bytes from the start of what the receiver gets of the bucket."""
    of_elements: int
    """All elements of this tensor that this receiver gets, over all buckets."""

    def num_bytes(self, spec: TensorSpec) -> int:
        return volume(self.box) * spec.dtype.itemsize

    def to_json(self) -> list[Any]:
        return [self.tensor, [list(side) for side in self.box], self.offset, self.of_elements]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Piece:
        tensor, box, offset, of_elements = value
        return cls(
            tensor=tensor, box=tuple((start, stop) for start, stop in box), offset=offset, of_elements=of_elements
        )

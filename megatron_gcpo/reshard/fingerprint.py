"""Integer checksums of tensors that add up over any way of cutting them.

A tensor is read as a matrix of machine words w[r, c] (leading dimensions are rows). Its fingerprint is the sum over all
elements of w[r, c] * (a(r) + b(c)) modulo 2^64, with pseudo-random odd a and even b. Sums over boxes that tile a tensor add
up to the tensor's own, in any order. The multiplier of a word is odd, hence invertible: a change of a single word always
shows; words in the wrong place show because a and b depend on the place (derived).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from megatron_gcpo.reshard.boxes import Box, sizes

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
BLOCK_BYTES = 1 << 18
"""On a CPU rows and columns are summed block by block, so that the second sum finds the block in the cache."""


def word_bytes(itemsize: int, cuts: Sequence[int]) -> int:
    """The widest word, in bytes, that none of these positions (elements of the last dimension) cuts in two."""
    return math.gcd(8, *(cut * itemsize for cut in cuts or (1,)))


def fingerprint(tensor: torch.Tensor, box: Box, shape: Sequence[int], word: int) -> int:
    """Of the part ``box`` of a tensor of this shape, in [-2^63, 2^63).

    Args:
        tensor: what the box holds, any dtype and strides.
        shape: of the whole tensor.
        word: bytes of a word (``word_bytes`` of all cuts ever made in this tensor's last dimension).
    """
    assert tuple(tensor.shape) == sizes(box), f"got {tuple(tensor.shape)} elements, expected those of the box {box}"
    if tensor.numel() == 0:
        return 0
    words = _words(tensor, word)
    first = (box[-1][0] if box else 0) * tensor.element_size() // word
    odd_R = _multipliers(_row_numbers(box, shape), 1)
    even_C = _multipliers(torch.arange(first, first + words.shape[1]), 0)
    num_rows = len(words) if words.is_cuda else max(1, BLOCK_BYTES // (words.shape[1] * word))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    columns_C = torch.zeros(words.shape[1], dtype=torch.int64, device=words.device)
    for block, odd in zip(words.split(num_rows), odd_R.to(words.device).split(num_rows), strict=True):
        total += (block.sum(1, dtype=torch.int64) * odd).sum()
        columns_C += block.sum(0, dtype=torch.int64)
    return int(total + (columns_C * even_C.to(words.device)).sum())


def add(a: int, b: int) -> int:
    """The fingerprint of two parts together."""
    return (a + b + 2**63) % 2**64 - 2**63


def _words(tensor: torch.Tensor, word: int) -> torch.Tensor:
    """[rows, words of a row]."""
    itemsize = tensor.element_size()
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
    if word <= itemsize:
        wide = math.gcd(word, itemsize)
        assert matrix.shape[1] * itemsize % word == 0, f"got rows of {matrix.shape[1] * itemsize} bytes and {word}"
        return (matrix if matrix.stride(1) == 1 else matrix.contiguous()).view(WORDS[wide])
    ratio = word // itemsize
    aligned = matrix.stride(1) == 1 and matrix.stride(0) % ratio == 0 and matrix.data_ptr() % word == 0
    if not aligned or matrix.storage_offset() % ratio:
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return matrix.view(WORDS[word])


def _row_numbers(box: Box, shape: Sequence[int]) -> torch.Tensor:
    """[rows] number of each row of the box within the whole tensor."""
    rows = torch.zeros(1, dtype=torch.int64)
    for (start, stop), size in zip(box[:-1], shape[:-1], strict=True):
        rows = (rows[:, None] * size + torch.arange(start, stop)).flatten()
    return rows


def _multipliers(numbers: torch.Tensor, low_bit: int) -> torch.Tensor:
    """Pseudo-random int64 of these numbers, with this lowest bit (the mixing steps of splitmix64, on signed integers)."""
    mixed = (numbers + 1 + (low_bit << 40)) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    mixed = mixed ^ (mixed >> 31)
    return mixed & ~1 | low_bit


@functools.cache
def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name such as "bfloat16". Raises ValueError for another."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

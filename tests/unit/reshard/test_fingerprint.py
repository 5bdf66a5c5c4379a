"""Fingerprints: they add up over any cutting, and any single wrong or misplaced element shows."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.reshard.boxes import part, whole
from megatron_gcpo.reshard.fingerprint import add, fingerprint, word_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.float64]


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every pattern of bits, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def of_whole(tensor: torch.Tensor) -> int:
    shape = tuple(tensor.shape)
    return fingerprint(tensor, whole(shape), shape, word_bytes(tensor.element_size(), shape[-1:]))


@st.composite
def cut_tensors(draw: st.DrawFn):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    sides = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
        edges = [0, *sorted(inner), size]
        sides.append(list(itertools.pairwise(edges)))
    return shape, dtype, sides


@given(cut_tensors(), st.randoms())
def test_parts_add_up_to_the_whole_in_any_order(cut, random) -> None:
    shape, dtype, sides = cut
    tensor = bits(shape, dtype)
    boxes = [()]
    for side in sides:
        boxes = [(*box, span) for box in boxes for span in side]
    random.shuffle(boxes)
    word = word_bytes(dtype.itemsize, [edge for span in sides[-1] for edge in span])
    total = 0
    for box in boxes:
        total = add(total, fingerprint(part(tensor, whole(shape), box), box, shape, word))
    assert total == fingerprint(tensor, whole(shape), shape, word)


@given(st.sampled_from(DTYPES), st.integers(0, 6 * 5 - 1), st.integers(0, 7), st.integers(0, 7))
def test_one_flipped_bit_shows(dtype, element, byte, bit) -> None:
    tensor = bits((6, 5), dtype)
    broken = tensor.clone()
    place = element * dtype.itemsize + byte % dtype.itemsize
    broken.view(torch.uint8).flatten()[place] ^= 1 << bit
    assert of_whole(broken) != of_whole(tensor)


@given(st.permutations(range(6)))
def test_rows_and_columns_in_the_wrong_place_show(order) -> None:
    tensor = bits((6, 6), torch.float64)
    if list(order) != list(range(6)):
        assert of_whole(tensor[list(order)]) != of_whole(tensor)
        assert of_whole(tensor[:, list(order)]) != of_whole(tensor)


def test_strides_do_not_matter() -> None:
    tensor = bits((64, 48), torch.bfloat16)
    assert of_whole(tensor.t().contiguous().t()) == of_whole(tensor)
    wider = bits((64, 100), torch.bfloat16)
    box = ((0, 64), (4, 52))
    assert fingerprint(wider[:, 4:52], box, (64, 100), 8) == fingerprint(wider[:, 4:52].clone(), box, (64, 100), 8)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,)])
def test_scalars_and_nothing(shape) -> None:
    tensor = torch.full(shape, 1.5)
    assert (fingerprint(tensor, whole(shape), shape, 4) == 0) == (tensor.numel() == 0)

"""Buckets of an export: everything once, in order, never more than asked for at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.reshard.gather import buckets

DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
TENSORS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=12)


def named(sizes: list[tuple[int, torch.dtype]]) -> list[tuple[str, torch.Tensor]]:
    return [(f"layer.{n}", torch.full((size,), n).to(dtype)) for n, (size, dtype) in enumerate(sizes)]


@given(TENSORS, st.integers(1, 200))
def test_buckets_hold_every_tensor_in_order_and_as_many_as_fit(
    sizes: list[tuple[int, torch.dtype]], bucket_bytes: int
) -> None:
    tensors = named(sizes)
    found = list(buckets(tensors, bucket_bytes))
    flat = [pair for bucket in found for pair in bucket]
    assert [name for name, _ in flat] == [name for name, _ in tensors]
    assert all(a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(flat, tensors, strict=True))
    held = [sum(tensor.nbytes for _, tensor in bucket) for bucket in found]
    for n, bucket in enumerate(found):
        assert bucket
        assert held[n] <= bucket_bytes or len(bucket) == 1
        if n + 1 < len(found):
            assert held[n] + found[n + 1][0][1].nbytes > bucket_bytes, "the next tensor would have fitted"


def test_a_bucket_outlives_the_tensors_it_was_made_of() -> None:
    """An exporter may reuse one buffer for all its tensors, and a bucket asks for one tensor beyond its own."""
    buffer, asked = torch.zeros(4), []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for n in range(5):
            asked.append(n)
            yield str(n), buffer.fill_(n)

    walk = buckets(export(), 2 * buffer.nbytes)
    first = next(walk)
    assert asked == [0, 1, 2]
    rest = list(walk)
    values = [[tensor.tolist() for _, tensor in bucket] for bucket in (first, *rest)]
    assert values == [[[0.0] * 4, [1.0] * 4], [[2.0] * 4, [3.0] * 4], [[4.0] * 4]]


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_must_hold_something(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"bucket_bytes must be positive, got {bucket_bytes}"):
        list(buckets([], bucket_bytes))

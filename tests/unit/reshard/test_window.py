"""Windows against real tensors: whatever a loader cuts out, the same elements arrive."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.reshard.boxes import part, whole
from megatron_gcpo.reshard.window import Untraceable, Window


class Holding:
    """An origin that has all its data."""

    name = "w"

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.shape, self.boxes = data, tuple(data.shape), []

    def copy_box(self, target, box) -> None:
        self.boxes.append(box)
        target.copy_(part(self.data, whole(self.shape), box))


def pair(*shape: int) -> tuple[torch.Tensor, Window, Holding]:
    data = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    origin = Holding(data)
    return data, Window.of(origin, data.dtype, torch.device("cpu")), origin


CUTS = {
    "narrow": lambda t: t.narrow(0, 2, 3),
    "slice both": lambda t: t[1:4, 2:5],
    "select": lambda t: t[3],
    "chunk": lambda t: t.chunk(2, dim=1)[1],
    "split": lambda t: t.split([2, 4], dim=0)[1],
    "view back": lambda t: t[2:4].view(2, 1, 6).squeeze(1),
    "one element": lambda t: t[2, 3],
    "whole": lambda t: t.detach(),
    "experts": lambda t: t.unsqueeze(0)[0][1:3],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_copied_cut_holds_the_same_elements(cut) -> None:
    data, window, _ = pair(6, 6)
    expected = cut(data)
    target = torch.full_like(expected, -1)
    target.copy_(cut(window))
    assert torch.equal(target, expected)


@given(st.data())
def test_any_slices_of_three_dimensions(draws) -> None:
    data, window, origin = pair(3, 4, 5)
    index = []
    for size in data.shape:
        start = draws.draw(st.integers(0, size - 1))
        index.append(slice(start, draws.draw(st.integers(start + 1, size))))
    target = torch.empty_like(data[tuple(index)])
    target.copy_(window[tuple(index)])
    assert torch.equal(target, data[tuple(index)])
    assert origin.boxes == [tuple((s.start, s.stop) for s in index)]


def test_a_dimension_of_size_one_may_come_or_go() -> None:
    data, window, _ = pair(1, 6)
    target = torch.empty(6)
    target.copy_(window.squeeze(0))
    assert torch.equal(target, data[0])
    data, window, _ = pair(6)
    wide = torch.empty(1, 6)
    wide[0].copy_(window)
    assert torch.equal(wide[0], data)


MORE_THAN_CUTS = {
    "transposed": lambda t: torch.empty(6, 6).copy_(t.t()),
    "every second": lambda t: torch.empty(3, 6).copy_(t[::2]),
    "scaled": lambda t: t * 2,
    "merged": lambda t: torch.empty(12).copy_(t[:2].view(-1)),
    "broadcast": lambda t: torch.empty(2, 6).copy_(t[0]),
}


@pytest.mark.parametrize("load", MORE_THAN_CUTS.values(), ids=MORE_THAN_CUTS)
def test_what_is_more_than_cutting_is_refused_by_name(load) -> None:
    _, window, origin = pair(6, 6)
    with pytest.raises(Untraceable, match=r"'w'|w$"):
        load(window)
    assert origin.boxes == []

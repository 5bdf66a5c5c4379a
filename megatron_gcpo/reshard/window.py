"""A stand-in for a whole Hugging Face tensor of which only some boxes are at hand.

A model's own weight loader narrows, selects and views what it is given and at last copies a part of it into a parameter.
A window lets it do so without memory for the whole: views are taken of numbers of elements alone, and the final copy is
answered by whoever holds the data (``Origin.copy_box``). The same windows tell which boxes a loader wants: an origin that
only takes note is a tracer.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from megatron_gcpo.reshard.boxes import Box

aten = torch.ops.aten
VIEWS = {
    aten.alias.default,
    aten.detach.default,
    aten.narrow.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
}
"""Operations that only choose elements, in order."""


class Untraceable(ValueError):
    """A weight loader did something to a tensor that is more than cutting it."""


class Origin(Protocol):
    """The whole tensor behind a window."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def copy_box(self, target: torch.Tensor, box: Box) -> None:
        """Fill ``target``, which has as many dimensions as the whole tensor and the sizes of the box."""
        ...


class Window(torch.Tensor):
    """A view of an origin, without data."""

    numbers: torch.Tensor
    """On the meta device: strides and offset tell which elements of the whole tensor this is."""
    origin: Origin

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, origin: Origin, device: torch.device) -> Window:
        window = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=device,
        )
        window.numbers, window.origin = numbers, origin
        return window

    @classmethod
    def of(cls, origin: Origin, dtype: torch.dtype, device: torch.device) -> Window:
        """The whole tensor."""
        return cls(torch.empty(origin.shape, dtype=dtype, device="meta"), origin, device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Window({self.origin.name!r}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is aten.copy_.default:
            target, source = args[:2]
            if isinstance(source, Window) and not isinstance(target, Window):
                _copy(target, source)
                return target
        if func in VIEWS and isinstance(args[0], Window):
            window = args[0]
            views = func(window.numbers, *args[1:], **(kwargs or {}))
            if isinstance(views, torch.Tensor):
                return cls(views, window.origin, window.device)
            return [cls(view, window.origin, window.device) for view in views]
        names = [a.origin.name for a in args if isinstance(a, Window)]
        raise Untraceable(f"the model's weight loader does {func} to {', '.join(names) or 'a tensor'}")


def _copy(target: torch.Tensor, source: Window) -> None:
    shape = source.origin.shape
    box = box_of(source)
    if target.squeeze().shape != source.numbers.squeeze().shape:
        raise Untraceable(
            f"the model's weight loader copies {tuple(source.shape)} of {source.origin.name!r} into {tuple(target.shape)}"
        )
    # Dimensions of size 1 may have come or gone on the way: give the target those of the whole tensor.
    target = target.squeeze()
    for dim in range(len(shape)):
        start, stop = box[dim]
        if stop - start == 1:
            target = target.unsqueeze(dim)
    source.origin.copy_box(target, box)


def box_of(window: Window) -> Box:
    """The box that a window covers. Raises Untraceable when it is none: dimensions swapped, merged, or with gaps."""
    shape, numbers = window.origin.shape, window.numbers
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    left = numbers.storage_offset()
    starts = []
    for stride in strides:
        starts.append(left // stride)
        left %= stride
    taken = [1] * len(shape)
    dim = 0
    for size, stride in zip(numbers.shape, numbers.stride(), strict=True):
        if size == 1:
            continue
        while dim < len(shape) and (strides[dim] != stride or shape[dim] == 1):
            dim += 1
        if dim == len(shape) or starts[dim] + size > shape[dim]:
            raise Untraceable(f"the model's weight loader rearranges {window.origin.name!r} beyond cutting it")
        taken[dim] = size
        dim += 1
    return tuple((start, start + size) for start, size in zip(starts, taken, strict=True))

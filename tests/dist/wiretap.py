"""Everything a rank sends to others, by the ranks that may see it: wraps the collectives of every process group."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
"""Every method of a process group that carries tensors out of this rank."""
OVERWRITING = ("allreduce", "allreduce_coalesced", "reduce")
"""Those that leave their result where the input was. The others are read afterwards: until then, what they receive into
is memory that somebody else has freed."""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """One tensor of one call: sent by this rank, or received, so that somebody else has sent it."""

    collective: str
    ranks: tuple[int, ...]
    data: bytes
    obj: Any
    """What an object collective's bytes hold; None for other tensors."""


@contextmanager
def tapped() -> Iterator[list[Payload]]:
    """Every payload of this rank while the context is open."""
    payloads: list[Payload] = []
    originals = {name: vars(dist.ProcessGroup)[name] for name in COLLECTIVES}  # not getattr, which unbinds them

    def tap(name: str) -> Any:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group))
            seen = list(_tensors((args, kwargs))) if name in OVERWRITING else []
            work = originals[name].__get__(group)(*args, **kwargs)
            if work is not None:
                work.wait()
            for data in (*seen, *_tensors((args, kwargs))):
                obj, length = _pickled(data)
                payloads.append(Payload(collective=name, ranks=ranks, data=data[:length], obj=obj))
            return work

        return call

    for name in COLLECTIVES:
        setattr(dist.ProcessGroup, name, tap(name))
    try:
        yield payloads
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


def strings(obj: Any) -> list[str]:
    """Every string inside an object."""
    if isinstance(obj, str):
        return [obj]
    if isinstance(obj, dict):
        return [s for item in obj.items() for part in item for s in strings(part)]
    if isinstance(obj, list | tuple | set | frozenset):
        return [s for part in obj for s in strings(part)]
    if is_dataclass(obj):
        return [s for f in fields(obj) for s in strings(getattr(obj, f.name))]
    return []


def _tensors(arguments: Any) -> Iterator[bytes]:
    if isinstance(arguments, torch.Tensor):
        yield arguments.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(arguments, dict):
        yield from _tensors(list(arguments.values()))
    elif isinstance(arguments, list | tuple):
        for part in arguments:
            yield from _tensors(part)


def _pickled(data: bytes) -> tuple[Any, int]:
    """The object that a tensor's bytes hold, if any, and how many of them mean something.

    torch pads objects with whatever the memory held before.
    """
    if not data.startswith(b"\x80"):
        return None, len(data)
    stream = io.BytesIO(data)
    try:
        return pickle.load(stream), stream.tell()
    except Exception:  # arbitrary bytes may look like the beginning of any pickle
        return None, len(data)

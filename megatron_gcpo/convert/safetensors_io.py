"""Files of safetensors, read and written one tensor at a time, with nothing mapped into memory.

A mapped file counts as resident once touched, so a bounded memory needs plain reads. What a file claims about itself is
checked before a byte of it is believed: a header out of bounds, tensors that overlap, leave gaps or end after the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where one tensor lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    begin: int
    """Position of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_entries(file: Path) -> dict[str, Entry]:
    """The tensors of a file by name. Raises ValueError, naming file and tensor, for a file that cannot be trusted."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"{file} is truncated or no safetensors file: it has {size} bytes, its header asks for {length}"
            )
        try:
            header = json.loads(stream.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is damaged: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file} is damaged: its header is no table of tensors")
    header.pop("__metadata__", None)
    entries = {name: _entry(file, 8 + length, name, values) for name, values in header.items()}
    _check_tiling(file, entries, 8 + length, size)
    return entries


def _entry(file: Path, data_begin: int, name: str, values: Any) -> Entry:
    try:
        dtype, shape = DTYPES[values["dtype"]], tuple(values["shape"])
        begin, end = values["data_offsets"]
        sound = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)) and begin <= end
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{file}: tensor {name!r} is described by {values!r}, which cannot be read") from None
    if not sound:
        raise ValueError(f"{file}: tensor {name!r} has an impossible shape or place: {values!r}")
    entry = Entry(name=name, dtype=dtype, shape=shape, file=file, begin=data_begin + begin)
    if entry.num_bytes != end - begin:
        raise ValueError(
            f"{file}: tensor {name!r} of shape {list(shape)} and type {values['dtype']} needs {entry.num_bytes} bytes, "
            f"the file gives it {end - begin}"
        )
    return entry


def _check_tiling(file: Path, entries: Mapping[str, Entry], begin: int, size: int) -> None:
    position, before = begin, "the header"
    for entry in sorted(entries.values(), key=lambda e: (e.begin, e.num_bytes)):
        if entry.begin != position:
            what = "overlaps" if entry.begin < position else "leaves a gap after"
            raise ValueError(f"{file}: tensor {entry.name!r} {what} {before}: the file is damaged or forged")
        position, before = entry.begin + entry.num_bytes, f"tensor {entry.name!r}"
    if position != size:
        state = (
            f"truncated: {before} ends at byte {position}"
            if position > size
            else f"too long: {before} ends at byte {position}"
        )
        raise ValueError(f"{file} is {state} and the file has {size} bytes")


def read_tensor(entry: Entry) -> torch.Tensor:
    """The tensor, in memory of its own. Raises ValueError when the file has become shorter."""
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    view = memoryview(bytes_of(tensor))
    with entry.file.open("rb", buffering=0) as stream:
        read_into(stream, entry.begin, view, f"{entry.file}: tensor {entry.name!r}")
    return tensor


def read_into(stream: Any, position: int, view: memoryview, what: str) -> None:
    """Fill the view from this position of an open file. Raises ValueError at the file's end."""
    done = 0
    while done < len(view):
        count = os.preadv(stream.fileno(), [view[done:]], position + done)
        if count == 0:
            raise ValueError(f"{what} is truncated: {done} of {len(view)} bytes are there")
        done += count


def bytes_of(tensor: torch.Tensor) -> Any:
    """A numpy view of a contiguous tensor's bytes, [num_bytes] uint8."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def write_file(
    stream: BinaryIO, specs: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], tensors: Iterable[torch.Tensor]
) -> None:
    """A whole file: ``specs`` say what will come, then the tensors come, in that order."""
    stream.write(header_bytes(specs))
    for (name, dtype, shape), tensor in zip(specs, tensors, strict=True):
        got, expected = (tensor.dtype, tuple(tensor.shape)), (dtype, shape)
        assert got == expected, f"got {got} for {name}, expected {expected}"
        stream.write(bytes_of(tensor.contiguous()))


def header_bytes(specs: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Length and header, padded so that data begin at a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, dtype, shape, begin, end in _places(specs):
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _places(
    specs: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], int, int]]:
    position = 0
    for name, dtype, shape in specs:
        end = position + math.prod(shape) * dtype.itemsize
        yield name, dtype, shape, position, end
        position = end

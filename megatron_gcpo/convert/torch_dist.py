"""Megatron-Core's distributed checkpoint format (torch_dist), read and written one tensor at a time.

A folder holds ``.metadata``, a pickled table of global tensors, their chunks and the place of each chunk, and files in
which every chunk is one ``torch.save`` stream. Chunks may be cut in any way: readers take from each what they need. The
table is opened by an unpickler that knows the table's own classes and no others, chunks by the one that builds tensors
only: a folder from elsewhere runs nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.utils.serialization import config

from megatron_gcpo.convert.safetensors_io import bytes_of, read_into

METADATA = ".metadata"
BACKEND = "metadata.json"
OBJECTS = "__objects.distcp"
COMMON_STATE = "common_state/shard_0_1"
"""Under this key a checkpoint keeps what is neither a tensor nor per rank."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size) of a part of a global tensor."""

_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", "strided"},
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_get_layout"},
    "collections": {"OrderedDict"},
    "builtins": {"set"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a global tensor and where it is stored."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: Path
    begin: int
    length: int
    """Bytes of its stream in the file."""


@dataclass(frozen=True, kw_only=True)
class GlobalTensor:
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def is_torch_dist(path: Path) -> bool:
    return (path / METADATA).is_file()


def read_tensors(path: Path) -> dict[str, GlobalTensor]:
    """The global tensors of a folder by key. Raises ValueError, naming what, for a folder that cannot be trusted."""
    metadata = _read_metadata(path / METADATA)
    sizes: dict[str, int] = {}
    tensors = {}
    for key, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            continue
        chunks = tuple(_chunk(path, metadata, key, tuple(c.offsets), tuple(c.sizes), sizes) for c in described.chunks)
        tensors[key] = GlobalTensor(
            key=key, dtype=described.properties.dtype, shape=tuple(described.size), chunks=chunks
        )
    return tensors


def _read_metadata(file: Path) -> Any:
    try:
        with file.open("rb") as stream:
            metadata = _TableUnpickler(stream).load()
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{file} is no table of a torch_dist checkpoint: {error}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"{file} is no table of a torch_dist checkpoint")
    return metadata


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in _NAMES.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        )
        if not known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no such table needs")
        return super().find_class(module, name)


def _chunk(
    path: Path, metadata: Any, key: str, offset: tuple[int, ...], size: tuple[int, ...], sizes: dict[str, int]
) -> Chunk:
    info = metadata.storage_data.get(MetadataIndex(key, offset))
    if info is None:
        raise ValueError(f"{path / METADATA}: tensor {key!r} has no place for its chunk at {list(offset)}")
    if info.transform_descriptors:
        raise ValueError(f"{path}: tensor {key!r} is stored compressed ({info.transform_descriptors}): not supported")
    name = info.relative_path
    if Path(name).name != name:
        raise ValueError(f"{path / METADATA} names the file {name!r}: only files of the same folder are opened")
    if name not in sizes:
        sizes[name] = (path / name).stat().st_size if (path / name).is_file() else -1
    if sizes[name] < 0:
        raise ValueError(f"{path / name} is missing, tensor {key!r} is in it")
    if info.offset < 0 or info.offset + info.length > sizes[name]:
        raise ValueError(
            f"{path / name} is truncated: tensor {key!r} ends at byte {info.offset + info.length} and the file has "
            f"{sizes[name]} bytes"
        )
    return Chunk(offset=offset, size=size, file=path / name, begin=info.offset, length=info.length)


def read_box(tensor: GlobalTensor, box: Box, whole: torch.Tensor | None = None) -> torch.Tensor:
    """A part of a global tensor, [size] of the tensor's dtype, put together from the chunks that hold it.

    whole: where to put it, [size]; None: in memory of its own.

    Raises ValueError, naming file and tensor, when chunks are missing or damaged.
    """
    offset, size = box
    whole = torch.empty(size, dtype=tensor.dtype) if whole is None else whole
    got, expected = (tuple(whole.shape), whole.dtype), (size, tensor.dtype)
    assert got == expected, f"got a place of {got} for {tensor.key}, expected {expected}"
    filled = 0
    for chunk in tensor.chunks:
        low = tuple(map(max, offset, chunk.offset))
        high = tuple(min(o + s, co + cs) for o, s, co, cs in zip(offset, size, chunk.offset, chunk.size, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)) and math.prod(size):
            continue
        there = whole[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
        if there.shape == chunk.size and there.is_contiguous():
            _read_chunk(tensor, chunk, there)
        else:
            stored = _read_chunk(tensor, chunk, torch.empty(chunk.size, dtype=tensor.dtype))
            there.copy_(stored[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offset, strict=True))])
        filled += there.numel()
    if not tensor.chunks or filled != math.prod(size):
        raise ValueError(
            f"tensor {tensor.key!r} of shape {list(tensor.shape)}: its chunks hold {filled} of the {math.prod(size)} "
            f"elements at {list(offset)}"
        )
    return whole


def _read_chunk(tensor: GlobalTensor, chunk: Chunk, target: torch.Tensor) -> torch.Tensor:
    """``target``, contiguous, filled with the chunk."""
    what = f"{chunk.file}: tensor {tensor.key!r} at {list(chunk.offset)}"
    with _saying_damaged(what):
        stream = chunk.file.open("rb", buffering=0)
    with stream:
        window: Any = _Window(stream, chunk.begin, chunk.length)
        with _saying_damaged(what):  # described without its data, which are then copied once, straight to their place
            found = torch.load(window, map_location="meta", weights_only=True)
        if not torch.is_tensor(found) or found.shape != chunk.size or found.dtype != tensor.dtype:
            kind = f"{found.dtype} {list(found.shape)}" if torch.is_tensor(found) else type(found).__name__
            raise ValueError(f"{what} is {kind}, the table says {tensor.dtype} {list(chunk.size)}")
        begin = getattr(found.untyped_storage(), "_checkpoint_offset", None)  # torch sets it, for streams it can
        with _saying_damaged(what):
            if begin is None or not found.is_contiguous():
                window.seek(0)
                return target.copy_(torch.load(window, map_location="cpu", weights_only=True))
            begin += found.storage_offset() * found.itemsize
            if begin + target.nbytes > chunk.length:
                raise ValueError("it ends after its stream")
            read_into(stream, chunk.begin + begin, memoryview(bytes_of(target)), what)
    return target


@contextlib.contextmanager
def _saying_damaged(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{what} is damaged: {first}") from None


class _Window(io.RawIOBase):
    """A part of an open file that looks like a file."""

    def __init__(self, stream: BinaryIO | Any, begin: int, length: int) -> None:
        super().__init__()
        self.stream, self.begin, self.length, self.position = stream, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self.length - self.position, 0)]
        count = os.preadv(self.stream.fileno(), [view], self.begin + self.position) if len(view) else 0
        self.position += count
        return count


def write_chunk(stream: BinaryIO | Any, tensor: torch.Tensor) -> tuple[int, int]:
    """Append a chunk; (where it begins, its length) in the stream."""
    begin = stream.tell()
    # torch.save writes the whole storage of a view: give it one of just these bytes, without copying them.
    own = torch.frombuffer(bytes_of(tensor.contiguous()), dtype=tensor.dtype) if tensor.numel() else tensor.flatten()
    with config.patch({"save.compute_crc32": False}):  # the file has a sha256  # pyright: ignore[reportAttributeAccessIssue]
        torch.save(own.reshape(tensor.shape), stream)
    return begin, stream.tell() - begin


@dataclass(frozen=True, kw_only=True)
class Written:
    """A chunk that was written; JSON-able by asdict."""

    key: str
    dtype: str
    """As torch spells it, without "torch."."""
    shape: tuple[int, ...]
    """Of the global tensor."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    begin: int
    length: int


def write_table(path: Path, chunks: Iterable[Written], objects: Sequence[str]) -> None:
    """Complete a folder whose chunks are written: the table, and the per-layer objects, all empty, that models ask for."""
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for chunk in chunks:
        dtype = getattr(torch, chunk.dtype)
        tensor = described.setdefault(
            chunk.key,
            TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=torch.Size(chunk.shape), chunks=[]),
        )
        assert tensor.properties.dtype == dtype, f"got {dtype} in {chunk.key}, expected {tensor.properties.dtype}"
        index = MetadataIndex(chunk.key, chunk.offset, len(tensor.chunks))
        tensor.chunks.append(ChunkStorageMetadata(offsets=torch.Size(chunk.offset), sizes=torch.Size(chunk.size)))
        places[index] = _StorageInfo(chunk.file, chunk.begin, chunk.length)
    with (path / OBJECTS).open("wb") as stream:
        none, common = _write_object(stream, [None]), _write_object(stream, [{}])
    for key in (*objects, COMMON_STATE):
        described[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = common if key == COMMON_STATE else none
    with (path / METADATA).open("wb") as stream:
        pickle.dump(Metadata(state_dict_metadata=described, planner_data=None, storage_data=places), stream)
    (path / BACKEND).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def _write_object(stream: BinaryIO, value: Any) -> _StorageInfo:
    begin = stream.tell()
    torch.save(value, stream)
    return _StorageInfo(OBJECTS, begin, stream.tell() - begin)

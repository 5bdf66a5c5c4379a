"""Our torch_dist files against torch's own reader and writer, and tables that must not be believed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_gcpo.convert import torch_dist
from megatron_gcpo.convert.skeleton import Layout, Part

KEY = "layers.weight"


def write(path: Path, value: torch.Tensor, cut: tuple[int, ...]) -> None:
    """A folder with one global tensor, in boxes of at most this size, over two files."""
    path.mkdir(exist_ok=True)
    shape = tuple(value.shape)
    part = Part(key=KEY, shape=shape, offset=(0,) * len(shape), size=shape)
    chunks = []
    streams = {name: (path / name).open("wb") for name in ("__0_0.distcp", "__0_1.distcp")}
    for number, (offset, size) in enumerate(Layout(cuts={KEY: cut}, stages={}, num_stages=1).boxes(part)):
        file = list(streams)[number % 2]
        piece = value[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
        begin, length = torch_dist.write_chunk(streams[file], piece)
        dtype = str(value.dtype).removeprefix("torch.")
        chunks.append(
            torch_dist.Written(
                key=KEY, dtype=dtype, shape=shape, offset=offset, size=size, file=file, begin=begin, length=length
            )
        )
    for stream in streams.values():
        stream.close()
    torch_dist.write_table(path, chunks, ["layers._extra_state/shard_0_2", "layers._extra_state/shard_1_2"])


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], torch_dist.Box]:
    """(shape, how it is cut, a box of it)."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    cut = tuple(draw(st.integers(1, n)) for n in shape)
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    return shape, cut, (offset, size)


@settings(max_examples=40)
@given(cut_tensors())
def test_any_box_of_a_tensor_cut_in_any_way(tmp_path_factory: pytest.TempPathFactory, case: Any) -> None:
    shape, cut, (offset, size) = case
    path = tmp_path_factory.mktemp("td")
    value = torch.randn(shape).bfloat16()
    write(path, value, cut)

    tensor = torch_dist.read_tensors(path)[KEY]
    assert (tensor.shape, tensor.dtype) == (shape, torch.bfloat16)
    inside = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
    assert torch.equal(torch_dist.read_box(tensor, (offset, size)), value[inside])

    read_by_torch = {KEY: torch.zeros(shape, dtype=torch.bfloat16)}
    dcp.load(read_by_torch, checkpoint_id=path, no_dist=True)
    assert torch.equal(read_by_torch[KEY], value)


def test_what_torch_writes_we_read(tmp_path: Path) -> None:
    turned, part = torch.randn(4, 3).t(), torch.randn(6, 2)[2:4]
    written = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": turned, "d": part, "e": torch.empty(0, 2), "step": 7}
    dcp.save(written, checkpoint_id=tmp_path, no_dist=True)
    tensors = torch_dist.read_tensors(tmp_path)
    assert tensors.keys() == {"a", "b", "c", "d", "e"}
    for key, tensor in tensors.items():
        whole = ((0,) * len(tensor.shape), tensor.shape)
        assert torch.equal(torch_dist.read_box(tensor, whole), written[key])


class _Program:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def test_a_table_or_a_chunk_that_is_a_program_is_not_run(tmp_path: Path) -> None:
    marker, path = tmp_path / "ran", tmp_path / "td"
    write(path, torch.randn(4), (2,))
    table = (path / torch_dist.METADATA).read_bytes()
    for program in (
        pickle.dumps(_Program(marker)),
        pickle.dumps(eval),
        b"cos\nsystem\n(S'touch " + bytes(marker) + b"'\ntR.",
    ):
        (path / torch_dist.METADATA).write_bytes(program)
        with pytest.raises(ValueError, match=r".metadata is no table of a torch_dist checkpoint: it asks for"):
            torch_dist.read_tensors(path)
    (path / torch_dist.METADATA).write_bytes(table)
    tensor = torch_dist.read_tensors(path)[KEY]
    chunk = tensor.chunks[0]
    with chunk.file.open("wb") as stream:
        torch.save(_Program(marker), stream)
    forged = torch_dist.Chunk(
        offset=chunk.offset, size=chunk.size, file=chunk.file, begin=0, length=chunk.file.stat().st_size
    )
    forged_tensor = torch_dist.GlobalTensor(key=KEY, dtype=tensor.dtype, shape=(2,), chunks=(forged,))
    with pytest.raises(ValueError, match=r"__0_0.distcp: tensor 'layers.weight' at .0. is damaged"):
        torch_dist.read_box(forged_tensor, ((0,), (2,)))
    assert not marker.exists()


def change_table(path: Path, change: Any) -> None:
    file = path / torch_dist.METADATA
    table = pickle.loads(file.read_bytes())
    change(table)
    file.write_bytes(pickle.dumps(table))


def test_a_folder_that_lost_something_is_refused_with_names(tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        path = tmp_path / name
        write(path, torch.arange(4.0), (2,))
        return path

    path = fresh("cut off")
    file = path / "__0_1.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"__0_1.distcp is truncated: tensor 'layers.weight' ends at byte"):
        torch_dist.read_tensors(path)
    file.unlink()
    with pytest.raises(ValueError, match=r"__0_1.distcp is missing, tensor 'layers.weight' is in it"):
        torch_dist.read_tensors(path)

    path = fresh("elsewhere")
    index = MetadataIndex(KEY, (0,))
    change_table(path, lambda t: t.storage_data.update({index: _StorageInfo("../../etc/passwd", 0, 1)}))
    with pytest.raises(ValueError, match=r"names the file '../../etc/passwd': only files of the same folder"):
        torch_dist.read_tensors(path)

    path = fresh("no place")
    change_table(path, lambda t: t.storage_data.pop(index))
    with pytest.raises(ValueError, match=r"tensor 'layers.weight' has no place for its chunk at .0."):
        torch_dist.read_tensors(path)

    path = fresh("hole")
    change_table(path, lambda t: t.state_dict_metadata[KEY].chunks.pop(0))
    tensor = torch_dist.read_tensors(path)[KEY]
    with pytest.raises(ValueError, match=r"its chunks hold 2 of the 4 elements"):
        torch_dist.read_box(tensor, ((0,), (4,)))

    path = fresh("wrong type")
    change_table(path, lambda t: setattr(t.state_dict_metadata[KEY].properties, "dtype", torch.float16))
    tensor = torch_dist.read_tensors(path)[KEY]
    with pytest.raises(ValueError, match=r"is torch.float32 .2., the table says torch.float16 .2."):
        torch_dist.read_box(tensor, ((0,), (4,)))

    (path / torch_dist.METADATA).write_bytes(b"")
    with pytest.raises(ValueError, match=r"no table of a torch_dist checkpoint"):
        torch_dist.read_tensors(path)

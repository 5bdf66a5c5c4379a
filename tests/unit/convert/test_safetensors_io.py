"""Our reader and writer against the safetensors library, and files that must not be believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.convert import safetensors_io

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def tensors_of(shapes: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"t{n}": torch.randint(0, 2, shape, generator=generator).to(DTYPES[dtype])
        for n, (shape, dtype) in enumerate(shapes)
    }


@given(st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.integers(0, len(DTYPES) - 1)), max_size=5))
def test_what_the_library_writes_we_read_and_the_other_way(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[list[int], int]]
) -> None:
    folder = tmp_path_factory.mktemp("st")
    expected = tensors_of(shapes)
    safetensors.torch.save_file(expected, folder / "theirs")
    entries = safetensors_io.read_entries(folder / "theirs")
    assert entries.keys() == expected.keys()
    for name, tensor in expected.items():
        found = safetensors_io.read_tensor(entries[name])
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)

    # The library refuses data that do not begin where their type wants: wide types first, as the converter has them.
    order = sorted(expected, key=lambda name: -expected[name].dtype.itemsize)
    specs = [(name, expected[name].dtype, tuple(expected[name].shape)) for name in order]
    with (folder / "ours").open("wb") as stream:
        safetensors_io.write_file(stream, specs, (expected[name] for name in order))
    loaded = safetensors.torch.load_file(folder / "ours")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD = {
    "truncated": (b"\x01\x02", "truncated or no safetensors"),
    "header longer than the file": ((1 << 40).to_bytes(8, "little") + b"{}", "truncated or no safetensors"),
    "no JSON": ((4).to_bytes(8, "little") + b"{{{{", "not JSON"),
    "no table": ((2).to_bytes(8, "little") + b"[]", "no table"),
    "data cut off": (header(a=F32) + b"1234", "truncated: tensor 'a' ends at byte"),
    "data left over": (header(a=F32) + b"12345678+", "too long: tensor 'a'"),
    "overlap": (header(a=F32, b={**F32, "data_offsets": [4, 12]}) + b"0" * 12, "'b' overlaps tensor 'a'"),
    "gap": (header(a=F32, b={**F32, "data_offsets": [12, 20]}) + b"0" * 20, "'b' leaves a gap after tensor 'a'"),
    "wrong size": (header(a={**F32, "shape": [3]}) + b"0" * 8, "'a' of shape .3. and type F32 needs 12 bytes"),
    "unknown type": (header(a={**F32, "dtype": "F99"}) + b"0" * 8, "'a' is described by"),
    "negative": (header(a={**F32, "shape": [-2]}) + b"0" * 8, "'a' has an impossible shape"),
    "backwards": (header(a={**F32, "data_offsets": [8, 0]}) + b"0" * 8, "'a' has an impossible"),
    "not numbers": (header(a={**F32, "data_offsets": "no"}) + b"0" * 8, "'a' has an impossible|'a' is described"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_damaged_file_is_refused_with_its_name(case: str, tmp_path: Path) -> None:
    content, message = BAD[case]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        safetensors_io.read_entries(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "f"
    safetensors.torch.save_file({"a": torch.ones(100)}, file)
    entry = safetensors_io.read_entries(file)["a"]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"'a' is truncated: 392 of 400 bytes"):
        safetensors_io.read_tensor(entry)

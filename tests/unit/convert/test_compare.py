"""verify and inspect over Hugging Face folders, and the command around them (Megatron folders: tests/dist/test_convert.py)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron_gcpo.convert.compare import compare
from megatron_gcpo.convert.describe import describe
from tests.unit.convert.test_hf_folder import folder_of
from tools.convert_checkpoint import main

A = torch.arange(12.0).reshape(3, 4)


def folders(tmp_path: Path, **second: torch.Tensor) -> tuple[Path, Path]:
    first = {"a": A, "b": torch.ones(5, dtype=torch.bfloat16), "gone": torch.ones(2)}
    return (
        folder_of(tmp_path / "first", {"1.safetensors": first}),
        folder_of(tmp_path / "second", {"1.safetensors": {"new": torch.ones(1), **second}}),
    )


def test_equal_folders_in_other_files_are_equal(tmp_path: Path) -> None:
    first = folder_of(tmp_path / "1", {"1.safetensors": {"a": A, "b": A + 1}})
    second = folder_of(tmp_path / "2", {"1.safetensors": {"b": A + 1}, "2.safetensors": {"a": A}})
    found = compare(first, second)
    assert found.equal
    assert found.num_equal == 2
    assert found.norm_a == found.norm_b == pytest.approx(math.sqrt(float((A**2).sum() + ((A + 1) ** 2).sum())))
    assert found.norm_difference == 0


def test_every_kind_of_difference_is_named(tmp_path: Path) -> None:
    changed = A.clone()
    changed[1, 2] += 0.5
    changed[2, 3] -= 2
    first, second = folders(tmp_path, a=changed, b=torch.ones(5))
    found = compare(first, second)
    assert not found.equal
    assert found.num_equal == 0
    assert (found.missing, found.extra) == (("gone",), ("new",))
    values, dtype = sorted(found.different, key=lambda d: d.name)
    assert (values.name, values.what, dtype.name, dtype.what) == ("a", "values", "b", "dtype")
    assert "2 of 12 elements differ, first at [1, 2] (6 and 6.5), by at most 2" in values.detail
    assert dtype.detail == "bfloat16 and float32; the values are equal"
    assert found.norm_difference == pytest.approx(math.sqrt(0.5**2 + 2**2))


def test_shapes_and_signs_of_zero(tmp_path: Path) -> None:
    first, second = folders(tmp_path, a=A.T.contiguous(), b=torch.ones(5, dtype=torch.bfloat16))
    (difference,) = compare(first, second).different
    assert (difference.what, difference.detail) == ("shape", "[3, 4] and [4, 3]")
    zero = A.clone()
    zero[0, 0] = -0.0
    (difference,) = compare(first, folder_of(tmp_path / "z", {"1.safetensors": {"a": zero}})).different
    assert "zeros differ in sign" in difference.detail


def test_a_description_counts(tmp_path: Path) -> None:
    found = describe(folders(tmp_path)[0])
    assert (found.format, found.model_type, found.num_files) == ("Hugging Face", "qwen3", 1)
    assert (found.num_parameters, found.num_bytes) == (19, 12 * 4 + 5 * 2 + 2 * 4)
    assert found.dtypes == {"float32": 14, "bfloat16": 5}
    with pytest.raises(ValueError, match="no complete checkpoint"):
        describe(tmp_path / "nowhere")


def test_the_command_prints_and_returns_what_a_script_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = map(str, folders(tmp_path, a=A))
    assert main(["verify", first, first]) == 0
    assert "3 tensors equal bit for bit, 0 different" in capsys.readouterr().out
    assert main(["verify", first, second]) == 1
    out = capsys.readouterr().out
    assert "only in A: gone" in out
    assert "only in B: new" in out
    assert main(["inspect", first, "--tensors"]) == 0
    assert "a  float32 [3, 4]" in capsys.readouterr().out
    assert main(["verify", first, str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("convert_checkpoint: ")
    assert error.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        main(["hf-to-megatron", first, second, "--max-shard-bytes", "much"])

"""What a Hugging Face folder is believed, and what not."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from megatron_gcpo.convert import hf_folder
from megatron_gcpo.convert.hf_writer import Spec, index_of, read_manifest, write_checkpoint
from megatron_gcpo.convert.work import sha256_of

CONFIG = {"model_type": "qwen3", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)


def folder_of(path: Path, files: dict[str, dict[str, torch.Tensor]], **more: Any) -> Path:
    """A folder with these safetensors, an index over them, and what ``more`` says of the index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    for file, tensors in files.items():
        safetensors.torch.save_file(tensors, path / file)
    places = {name: file for file, tensors in files.items() for name in tensors}
    (path / hf_folder.INDEX).write_text(json.dumps({"weight_map": places | more}))
    return path


def two_files(path: Path, **more: Any) -> Path:
    return folder_of(path, {"1.safetensors": {"a": A}, "2.safetensors": {"b": B}}, **more)


def test_a_sharded_folder_is_read_tensor_by_tensor(tmp_path: Path) -> None:
    folder = hf_folder.open_folder(two_files(tmp_path))
    assert folder.config.model_type == "qwen3"
    assert folder.config.architectures == ["Qwen3ForCausalLM"]
    assert torch.equal(folder.tensors["a"], A)
    assert torch.equal(folder.tensors["b"], B)
    assert set(folder.tensors) == {"a", "b"}
    assert folder.num_bytes == 24 + 8


REFUSED = {
    "path traversal": ({"c": "../../etc/passwd.safetensors"}, "only safetensors files of the same folder"),
    "absolute path": ({"c": "/etc/passwd.safetensors"}, "only safetensors files of the same folder"),
    "another format": ({"c": "evil.bin"}, "only safetensors files of the same folder"),
    "missing file": ({"c": "3.safetensors"}, r"3.safetensors is missing"),
    "missing tensor": ({"c": "2.safetensors"}, r"2.safetensors: tensor 'c' is missing"),
    "wrong place": ({"a": "2.safetensors"}, r"2.safetensors: tensor 'a' is missing|1.safetensors is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_index_that_lies_is_refused(case: str, tmp_path: Path) -> None:
    more, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        hf_folder.open_folder(two_files(tmp_path / "m", **more))


def test_a_tensor_that_the_index_does_not_know_is_extra(tmp_path: Path) -> None:
    path = two_files(tmp_path)
    safetensors.torch.save_file({"b": B, "backdoor": A}, path / "2.safetensors")
    with pytest.raises(ValueError, match=r"2.safetensors: tensor 'backdoor' is extra"):
        hf_folder.open_folder(path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    path = two_files(tmp_path)
    safetensors.torch.save_file({"b": B, "a": A}, path / "2.safetensors")
    with pytest.raises(ValueError, match=r"tensor 'a' is in 1.safetensors too"):
        hf_folder.open_folder(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_that_is_not_finite_is_named(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    bad = torch.ones(50, dtype=dtype)
    bad[7] = value
    path = folder_of(tmp_path, {"1.safetensors": {"bad": bad, "good": torch.full((9,), 60000.0, dtype=dtype)}})
    folder = hf_folder.open_folder(path)
    folder.read("good")  # its sum overflows in float16: that alone is no reason to refuse
    with pytest.raises(ValueError, match=r"1.safetensors: tensor 'bad' holds 1 values that are NaN or infinite"):
        folder.read("bad")


class _Program:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.marker),))  # type: ignore[attr-defined]


def test_pickles_are_refused_unless_allowed_and_never_run(tmp_path: Path) -> None:
    path = tmp_path / "pickled"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"a": A, "b": B}, path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"can run any program .* --allow-pickle"):
        hf_folder.open_folder(path)
    folder = hf_folder.open_folder(path, allow_pickle=True)
    assert torch.equal(folder.read("a"), A)
    assert torch.equal(folder.read("b"), B)

    program = _Program()
    program.marker = str(tmp_path / "ran")  # type: ignore[attr-defined]
    torch.save({"a": program}, path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin cannot be opened"):
        hf_folder.open_folder(path, allow_pickle=True)
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(program))
    with pytest.raises(ValueError, match=r"pytorch_model.bin cannot be opened"):
        hf_folder.open_folder(path, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    path = two_files(tmp_path / "m")
    marker = tmp_path / "ran"
    (path / "configuration_evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass EvilConfig: ...\n")
    custom = {**CONFIG, "model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}
    (path / "config.json").write_text(json.dumps(custom))
    with pytest.raises(ValueError, match=r"config.json: no model config can be read"):
        hf_folder.open_folder(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "no model config"), ('{"model_type": "clip"}', "no causal language model"), (None, "no model config")],
)
def test_a_config_that_is_none_is_said(text: str | None, message: str, tmp_path: Path) -> None:
    path = two_files(tmp_path)
    (path / "config.json").unlink()
    if text is not None:
        (path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        hf_folder.open_folder(path)


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder"):
        hf_folder.open_folder(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="it is no Hugging Face checkpoint"):
        hf_folder.open_folder(tmp_path)


def test_a_folder_is_written_in_shards_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    source = two_files(tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ x }}")
    (source / "modeling.py").write_text("")
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("replaced")
    config = hf_folder.read_config(source)
    tensors = {"w": torch.randn(100), "x": torch.randn(50).bfloat16(), "y": torch.randn(10, 10), "z": torch.randn(1000)}
    write_checkpoint(target, iter(tensors.items()), hf_config=config, carry_from=source, max_shard_bytes=600)

    names = sorted(file.name for file in target.iterdir())
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    beside = ["chat_template.jinja", "config.json", "manifest.json", "model.safetensors.index.json", "tokenizer.json"]
    assert names == sorted([*shards, *beside])
    folder = hf_folder.open_folder(target)
    assert set(folder.entries) == set(tensors)
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in tensors.items())
    index = json.loads((target / hf_folder.INDEX).read_text())
    assert index["metadata"] == {"total_parameters": 1250, "total_size": 4900}
    manifest = read_manifest(target)
    assert manifest is not None
    assert manifest["files"].keys() == set(names) - {"manifest.json"}
    for name, said in manifest["files"].items():
        assert said == {"bytes": (target / name).stat().st_size, "sha256": sha256_of(target / name)}


def test_tensors_that_fail_to_come_leave_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "target"
    config = hf_folder.read_config(two_files(tmp_path / "source"))
    write_checkpoint(target, iter([("a", A)]), hf_config=config)

    def breaks() -> Any:
        yield "a", B
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"the disk of .* is full"):
        write_checkpoint(target, breaks(), hf_config=config, max_shard_bytes=1)
    assert torch.equal(hf_folder.open_folder(target).read("a"), A)


def test_the_index_counts_parameters_and_bytes() -> None:
    specs = [Spec(name="b", dtype=torch.bfloat16, shape=(2, 3)), Spec(name="a", dtype=torch.float32, shape=())]
    index = index_of({"1": specs[:1], "2": specs[1:]})
    assert index == {"metadata": {"total_parameters": 7, "total_size": 16}, "weight_map": {"a": "2", "b": "1"}}

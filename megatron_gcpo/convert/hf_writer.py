"""Hugging Face folders as they are written: which file holds what, the index, and what travels beside the weights."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from megatron_gcpo.convert import safetensors_io, work
from megatron_gcpo.convert.hf_folder import INDEX, WEIGHTS, carried_files
from megatron_gcpo.policy.manifest import NAME as MANIFEST
from megatron_gcpo.policy.manifest import flush, write_json

FORMAT = "huggingface"
TEMPLATE = "model-{:05d}-of-{:05d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_checkpoint(
    target: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    hf_config: PretrainedConfig,
    carry_from: Path | None = None,
    max_shard_bytes: int = 2 << 30,
) -> Path:
    """A folder of these CPU tensors, in place only once it is whole; what was there before is replaced.

    Holds at most ``max_shard_bytes`` and one tensor. carry_from: a folder whose tokenizer, generation config and template
    travel along (its config.json does not: ``hf_config`` is written). Raises ValueError for a full disk.
    """
    target = Path(target)
    partial = work.partial_of(target)
    with work.saying_disk_full(target):
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        drafts: list[tuple[list[Spec], str]] = []
        batch: list[tuple[str, torch.Tensor]] = []
        for name, tensor in tensors:
            if batch and sum(t.nbytes for _, t in batch) + tensor.nbytes > max_shard_bytes:
                drafts.append(_write_draft(partial, len(drafts), batch))
                batch = []
            batch.append((name, tensor.detach().contiguous()))
        drafts.append(_write_draft(partial, len(drafts), batch))
        names = file_names(len(drafts))
        for number, name in enumerate(names):
            (partial / f"{number}.draft").rename(partial / name)
        contents = {name: specs for name, (specs, _) in zip(names, drafts, strict=True)}
        hashes = {name: sha256 for name, (_, sha256) in zip(names, drafts, strict=True)}
        complete_folder(partial, contents, hf_config, carried_files(carry_from) if carry_from else [], hashes)
        work.replace_folder(partial, target)
    return target


def _write_draft(partial: Path, number: int, batch: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[Spec], str]:
    # Wide types first, so that every tensor begins at a multiple of its item size.
    batch = sorted(batch, key=lambda item: -item[1].dtype.itemsize)
    specs = [Spec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in batch]
    output = work.Output(partial / f"{number}.draft", lambda num_bytes: None)
    write_tensors(output, specs, (tensor for _, tensor in batch))
    return specs, output.close()


def write_tensors(output: Any, specs: Sequence[Spec], tensors: Iterable[torch.Tensor]) -> None:
    safetensors_io.write_file(output, [(s.name, s.dtype, s.shape) for s in specs], tensors)


def file_names(count: int) -> list[str]:
    return [WEIGHTS] if count == 1 else [TEMPLATE.format(n + 1, count) for n in range(count)]


def complete_folder(
    partial: Path,
    contents: Mapping[str, Sequence[Spec]],
    hf_config: PretrainedConfig | None,
    carried: Iterable[Path],
    hashes: dict[str, str],
) -> None:
    """Index, config, files that travel along and, last, the manifest with the sha256 of every file.

    hf_config: None leaves the config.json that was carried as it is.
    """
    for file in carried:
        work.copy_file(file, partial / file.name)
    if hf_config is not None:
        (partial / "config.json").write_text(hf_config.to_json_string(use_diff=True))
    if len(contents) > 1:
        write_json(partial / INDEX, index_of(contents))
    files = work.lasting_files(partial)
    for file in files.values():
        flush(file)
    hashes |= {name: work.sha256_of(file) for name, file in files.items() if name not in hashes}
    listed = {name: {"bytes": file.stat().st_size, "sha256": hashes[name]} for name, file in files.items()}
    write_json(partial / MANIFEST, {"format": FORMAT, "files": listed})


def index_of(contents: Mapping[str, Sequence[Spec]]) -> dict[str, Any]:
    specs = [spec for part in contents.values() for spec in part]
    places = {spec.name: file for file, part in contents.items() for spec in part}
    return {
        "metadata": {
            "total_parameters": sum(math.prod(spec.shape) for spec in specs),
            "total_size": sum(spec.num_bytes for spec in specs),
        },
        "weight_map": dict(sorted(places.items())),
    }


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a folder that we wrote; None: it has none."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None

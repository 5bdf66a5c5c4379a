"""A Megatron checkpoint becomes a Hugging Face folder: safetensors, index, config, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from megatron_gcpo.cluster import platform as platforms
from megatron_gcpo.convert import work
from megatron_gcpo.convert.hf_writer import Spec, complete_folder, file_names, write_tensors
from megatron_gcpo.convert.megatron_folder import HfView, MegatronFolder, open_folder
from megatron_gcpo.convert.skeleton import Unit, open_skeleton
from megatron_gcpo.convert.work import Job, Options, Output

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A file: the tensors it will hold, in order, and the units they come from."""

    specs: tuple[Spec, ...]
    units: tuple[Unit, ...]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    reference: str | Path | None = None,
    dtype: str | None = None,
    options: Options | None = None,
) -> Path:
    """Convert a checkpoint (the newest one, of a run's folder) into the new folder ``target``, which is returned.

    reference: a Hugging Face folder whose config, tokenizer and generation config are taken; None: those kept from the
    folder that the checkpoint was made from, or the config alone.  dtype: "fp32" or "bf16" to cast to; None: as it is.

    Raises ValueError for a source that cannot be trusted or translated, naming file and tensor, and for a full disk.
    """
    target, options = Path(target), options or Options()
    platform = platforms.install("cpu")
    work.check_target(target, options)
    folder = open_folder(source, reference)
    with open_skeleton(folder.config, platform) as skeleton, work.saying_disk_full(target):
        view = HfView(folder=folder, skeleton=skeleton, dtype=dtype)
        view.check()
        files = _files(view, skeleton.units, options.max_shard_bytes)
        names = file_names(len(files))
        skeleton.hold_on_cpu()

        def write(number: int, output: Output) -> None:
            write_tensors(output, files[number].specs, _tensors(view, files[number]))

        jobs = [Job(file=name, num_bytes=file.num_bytes) for name, file in zip(names, files, strict=True)]
        records = work.carry_out(target, jobs, write, _identity(folder, dtype), options)
        contents = {name: file.specs for name, file in zip(names, files, strict=True)}
        hashes = {record.file: record.sha256 for record in records}
        config = _config_to_write(folder, files)
        complete_folder(work.partial_of(target), contents, config, folder.carried, hashes)
        work.finish(target)
    return target


def _files(view: HfView, units: Sequence[Unit], max_bytes: int) -> list[Planned]:
    """Units in the model's order, in files of at most ``max_bytes`` or one unit; wide types first in each.

    So every tensor begins at a multiple of its item size.
    """
    batches: list[list[tuple[Unit, list[Spec]]]] = [[]]
    size = 0
    for unit in sorted(units, key=lambda unit: unit.position):
        specs = view.specs(unit)
        specs += [
            Spec(name=copy, dtype=spec.dtype, shape=spec.shape)
            for copy, other in view.folder.tied.items()
            for spec in specs
            if spec.name == other
        ]
        more = sum(spec.num_bytes for spec in specs)
        if batches[-1] and size + more > max_bytes:
            batches.append([])
            size = 0
        batches[-1].append((unit, specs))
        size += more
    files = []
    for batch in batches:
        batch = sorted(batch, key=lambda item: -max(spec.dtype.itemsize for spec in item[1]))
        specs = tuple(spec for _, part in batch for spec in part)
        files.append(Planned(specs=specs, units=tuple(unit for unit, _ in batch)))
    return files


def _tensors(view: HfView, file: Planned) -> Iterator[torch.Tensor]:
    wanted = {spec.name for spec in file.specs}
    for unit in file.units:
        tensors = view.tensors(unit)
        yield from tensors.values()
        yield from (tensors[other] for copy, other in view.folder.tied.items() if copy in wanted and other in tensors)


def _identity(folder: MegatronFolder, dtype: str | None) -> dict[str, Any]:
    files = sorted({chunk.file for tensor in folder.tensors.values() for chunk in tensor.chunks})
    stats = [[str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return {"source": stats, "config": folder.config.to_json_string(use_diff=False), "dtype": dtype}


def _config_to_write(folder: MegatronFolder, files: Sequence[Planned]) -> PretrainedConfig | None:
    """None: the config.json that is carried along says what the weights are; else it, with the type of most of them."""
    sizes: dict[torch.dtype, int] = {}
    for spec in (spec for file in files for spec in file.specs):
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.num_bytes
    name = DTYPE_NAMES[max(sizes, key=lambda dtype: sizes[dtype])]
    carried = [file for file in folder.carried if file.name == "config.json"]
    if carried:
        values = json.loads(carried[0].read_text())
        if values.get("dtype", values.get("torch_dtype", name)) == name:
            return None
    config = type(folder.config).from_dict(folder.config.to_dict())
    config.dtype = name
    return config

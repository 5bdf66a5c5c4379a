"""A Hugging Face checkpoint becomes a checkpoint folder of the trainer, for model.start_from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_gcpo.cluster import platform as platforms
from megatron_gcpo.cluster.grid import expert_tensor_parallel_size
from megatron_gcpo.config.records import ClusterConfig
from megatron_gcpo.convert import torch_dist, work
from megatron_gcpo.convert.check_source import MetaTensors, check_tensors, refuse_quantised
from megatron_gcpo.convert.hf_folder import HfFolder, open_folder
from megatron_gcpo.convert.skeleton import Layout, Skeleton, Unit, open_skeleton, read_layout
from megatron_gcpo.convert.work import Job, Options, Output
from megatron_gcpo.policy import manifest as manifests
from megatron_gcpo.policy.options import DTYPES

CARRIED = "hf"
"""Folder of the checkpoint that keeps what came beside the weights: config, tokenizer, generation config."""
TIED = "tied.json"
"""In it: Hugging Face tensors that repeat another one -> that other one."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A file and the units in it."""

    job: Job
    units: tuple[Unit, ...]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    cluster: ClusterConfig | None = None,
    megatron: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    options: Options | None = None,
) -> Path:
    """Convert ``source`` into the new folder ``target``, which is returned.

    cluster: the layout whose ranks read fastest what is written; any other reads it too.  megatron: model.megatron of that
    layout (uneven stages).  dtype: "fp32" or "bf16" to cast to; None: as it is.

    Raises ValueError for a source that cannot be trusted or translated, naming file and tensor, and for a full disk.
    """
    target, options, cluster = Path(target), options or Options(), cluster or ClusterConfig()
    platform = platforms.install("cpu")
    work.check_target(target, options)
    folder = open_folder(source, allow_pickle=options.allow_pickle)
    refuse_quantised(folder)
    layout = read_layout(folder.config, cluster, platform, megatron or {})
    with open_skeleton(folder.config, platform) as skeleton, work.saying_disk_full(target):
        tied = check_tensors(skeleton, folder, options.leave_out)
        stored = _stored_dtypes(skeleton, folder, dtype)
        files = _files(skeleton, layout, stored, options.max_shard_bytes)
        skeleton.hold_on_cpu()

        def write(number: int, output: Output) -> list[dict[str, Any]]:
            return _write(files[number], skeleton, folder, layout, stored, output)

        jobs = [file.job for file in files]
        identity = _identity(folder, {"cuts": {k: list(v) for k, v in layout.cuts.items()}, "dtype": dtype})
        records = work.carry_out(target, jobs, write, identity, options)
        partial = work.partial_of(target)
        chunks = [torch_dist.Written(**chunk) for record in records for chunk in record.result]
        torch_dist.write_table(partial, chunks, skeleton.objects)
        _carry(folder, tied, partial / CARRIED)
        hashes = {record.file: record.sha256 for record in records}
        _write_manifest(partial, folder, cluster, stored, hashes)
        work.finish(target)
    return target


def _stored_dtypes(skeleton: Skeleton, folder: HfFolder, dtype: str | None) -> dict[str, torch.dtype]:
    """In which type each global tensor is stored: as it came, or the one asked for where the model does not insist on fp32."""
    stored: dict[str, torch.dtype] = {}
    meta = MetaTensors(folder)
    first: dict[str, str] = {}
    for unit in skeleton.units:
        for parameter in unit.parameters:
            came = skeleton.to_megatron(parameter, meta).dtype
            kept = came if dtype is None or parameter.keeps_fp32 else DTYPES[dtype]
            if kept == torch.float16:
                raise ValueError(
                    f"{folder.path} is in float16, which the trainer does not store: pass --dtype bf16 or fp32"
                )
            key = parameter.parts[0].key
            if stored.setdefault(key, kept) != kept:
                raise ValueError(
                    f"{folder.path}: {first[key]} and {parameter.name} are of different types ({stored[key]} and {kept}), but "
                    "are stored as one tensor: pass --dtype bf16 or fp32"
                )
            first.setdefault(key, parameter.name)
    return stored


def _files(skeleton: Skeleton, layout: Layout, stored: Mapping[str, torch.dtype], max_bytes: int) -> list[Planned]:
    """Units in the model's order, stage by stage, in files of at most ``max_bytes`` or one unit."""
    files: list[Planned] = []
    for stage in range(layout.num_stages):
        batch: list[Unit] = []
        size = 0
        mine = sorted((unit for unit in skeleton.units if layout.stage(unit) == stage), key=lambda unit: unit.position)
        for unit in [*mine, None]:
            more = 0 if unit is None else _num_bytes(unit, stored)
            if batch and (unit is None or size + more > max_bytes):
                number = sum(file.job.file.startswith(f"__{stage}_") for file in files)
                job = Job(file=f"__{stage}_{number}.distcp", num_bytes=size)
                files.append(Planned(job=job, units=tuple(batch)))
                batch, size = [], 0
            if unit is not None:
                batch, size = [*batch, unit], size + more
    return files


def _num_bytes(unit: Unit, stored: Mapping[str, torch.dtype]) -> int:
    return sum(torch.Size(p.shape).numel() * stored[p.parts[0].key].itemsize for p in unit.parameters)


def _write(
    file: Planned,
    skeleton: Skeleton,
    folder: HfFolder,
    layout: Layout,
    stored: Mapping[str, torch.dtype],
    output: Output,
) -> list[dict[str, Any]]:
    """The chunks of a file, as their records."""
    chunks = []
    for unit in file.units:
        tensors: Mapping[str, torch.Tensor] = _Once(folder.tensors) if unit.grouped else folder.tensors
        for parameter in unit.parameters:
            value = skeleton.to_megatron(parameter, tensors)
            value = value.to(stored[parameter.parts[0].key])
            for part, tensor in zip(parameter.parts, parameter.split(value), strict=True):
                for offset, size in layout.boxes(part):
                    inside = tuple(slice(o - p, o - p + s) for o, p, s in zip(offset, part.offset, size, strict=True))
                    begin, length = torch_dist.write_chunk(output, tensor[inside])
                    chunk = torch_dist.Written(
                        key=part.key,
                        dtype=str(tensor.dtype).removeprefix("torch."),
                        shape=part.shape,
                        offset=offset,
                        size=size,
                        file=file.job.file,
                        begin=begin,
                        length=length,
                    )
                    chunks.append(asdict(chunk))
            del value
    return chunks


class _Once(dict[str, torch.Tensor]):
    """Keeps what was read: all experts of a fused tensor come from one reading of it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def __missing__(self, name: str) -> torch.Tensor:
        return self.setdefault(name, self.tensors[name])

    def __contains__(self, name: object) -> bool:
        return name in self.tensors


def _identity(folder: HfFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a half-finished folder must have been made from."""
    files = sorted({entry.file for entry in folder.entries.values()})
    stats = [[str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return {"source": stats, "config": folder.config.to_json_string(use_diff=False), **settings}


def _carry(folder: HfFolder, tied: Mapping[str, str], target: Path) -> None:
    target.mkdir(exist_ok=True)
    for file in folder.carried():
        work.copy_file(file, target / file.name)
    if tied:
        manifests.write_json(target / TIED, tied)


def _write_manifest(
    partial: Path, folder: HfFolder, cluster: ClusterConfig, stored: Mapping[str, torch.dtype], hashes: dict[str, str]
) -> None:
    files = work.lasting_files(partial)
    hashes |= {name: work.sha256_of(file) for name, file in files.items() if name not in hashes}
    sizes = {
        "tensor": cluster.tensor_model_parallel_size,
        "pipeline": cluster.pipeline_model_parallel_size,
        "virtual_pipeline": cluster.virtual_pipeline_model_parallel_size or 1,
        "context": 1,
        "expert": cluster.expert_model_parallel_size,
        "expert_tensor": expert_tensor_parallel_size(cluster),
        "data": 1,
    }
    dtypes = list(stored.values())
    made = manifests.of_files(
        partial,
        files.values(),
        step=0,
        layout=sizes,
        dtype=manifests.dtype_name(max(set(dtypes), key=dtypes.count)),
        hf_config=folder.config,
        sha256=hashes,
    )
    manifests.write(partial, made)

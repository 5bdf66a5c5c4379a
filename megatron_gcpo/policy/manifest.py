"""What a checkpoint folder says of itself, and which folders of a run may be trusted. No tensors here."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from megatron_gcpo.cluster.topology import Topology
    from megatron_gcpo.config.records import LoraConfig
    from megatron_gcpo.policy.model import Policy

FORMAT = 1
PARTIAL = ".partial"
NAME = "manifest.json"
EXTRA = "extra.json"
PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformers")
NOT_IDENTITY = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Keys of a Hugging Face config that may change while the weights stay the same."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    format: int
    step: int
    versions: dict[str, str]
    layout: dict[str, int]
    """Parallel sizes that wrote it."""
    dtype: str
    """"fp32" or "bf16"."""
    model: dict[str, Any]
    """The Hugging Face config."""
    model_hash: str
    """sha256 of what identifies the model in it."""
    files: dict[str, int]
    """Bytes of every other file."""
    sha256: dict[str, str] = field(default_factory=dict)
    """Of the files whose writer hashed them."""
    lora: dict[str, Any] | None = None
    """Only adapters are in it: their settings (model.lora), and ``base``, which identifies the model below them."""


def describe(policy: Policy, topology: Topology, path: Path, step: int) -> Manifest:
    """The manifest of what is in the folder now; flushes its files to the disk."""
    adapters = policy.adapters
    files = [p for p in path.rglob("*") if p.is_file()]
    written = of_files(
        path,
        files,
        step=step,
        layout=layout(topology, policy),
        dtype=dtype_name(policy.dtype),
        hf_config=policy.hf_config,
    )
    return replace(
        written, lora=None if adapters is None else {**_lora_settings(adapters.config), "base": adapters.base}
    )


def of_files(
    path: Path,
    files: Iterable[Path],
    *,
    step: int,
    layout: dict[str, int],
    dtype: str,
    hf_config: PretrainedConfig,
    sha256: Mapping[str, str] | None = None,
) -> Manifest:
    """``describe`` for a writer that is no run: of these files in the folder."""
    files = sorted(files)
    for file in files:
        flush(file)
    model = _config(hf_config)
    return Manifest(
        format=FORMAT,
        step=step,
        versions={name: importlib.metadata.version(name) for name in PACKAGES},
        layout=layout,
        dtype=dtype,
        model=model,
        model_hash=_hash(model),
        files={str(p.relative_to(path)): p.stat().st_size for p in files},
        sha256=dict(sha256 or {}),
    )


def layout(topology: Topology, policy: Policy) -> dict[str, int]:
    return {
        "tensor": topology.tp_size,
        "pipeline": topology.pp_size,
        "virtual_pipeline": len(policy.chunks),
        "context": topology.cp_size,
        "expert": topology.ep_size,
        "expert_tensor": topology.etp_size,
        "data": topology.dp_size,
    }


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def folder(run_dir: str | Path, step: int) -> Path:
    return Path(run_dir) / "checkpoints" / f"step_{step:08d}"


def write(path: Path, manifest: Manifest) -> None:
    write_json(path / NAME, asdict(manifest))


def write_extra(path: Path, extra_state: Mapping[str, Any]) -> None:
    write_json(path / EXTRA, dict(extra_state))


def read_extra(path: Path) -> dict[str, Any]:
    return json.loads((path / EXTRA).read_text())


def read(path: Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises ValueError for a folder that is none, is torn, or lost a file.
    """
    if path.name.endswith(PARTIAL) or not (path / NAME).is_file():
        raise ValueError(f"{path} is not a complete checkpoint (no {NAME}): use an older one of the run")
    try:
        manifest = Manifest(**json.loads((path / NAME).read_text()))
    except (json.JSONDecodeError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path / NAME} cannot be read ({error}): use an older checkpoint of the run") from None
    if manifest.format != FORMAT:
        raise ValueError(f"{path} has checkpoint format {manifest.format}, this version reads {FORMAT}")
    for name, size in manifest.files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise ValueError(f"{path} is damaged: {name} {state}: use an older checkpoint of the run")
    return manifest


def complete(run_dir: str | Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = []
    for path in sorted((Path(run_dir) / "checkpoints").glob("step_*")):
        try:
            read(path)
        except ValueError:
            continue
        found.append(path)
    return found


def newest(run_dir: str | Path) -> Path | None:
    """The newest complete checkpoint of a run; None: there is none."""
    return (complete(run_dir) or [None])[-1]


def resolve(path: str | Path) -> Path:
    """The checkpoint meant by a checkpoint folder or by the folder of a run.

    Raises ValueError when neither is there.
    """
    path = Path(path)
    if (path / NAME).is_file():
        return path
    found = newest(path)
    if found is None:
        raise ValueError(f"there is no complete checkpoint in {path}: name a run directory or one of its checkpoints")
    return found


def resolve_start(path: str | Path) -> Path:
    """The checkpoint meant by model.start_from. Raises ValueError when there is none yet."""
    try:
        return resolve(path)
    except ValueError as error:
        raise ValueError(
            f"model.start_from: {error}. If that run is this one's warm start, train it first (megatron-gcpo train RECIPE); "
            "leave model.start_from out to start from model.path or from random weights"
        ) from None


def check_model(manifest: Manifest, hf_config: PretrainedConfig, path: Path) -> None:
    """Raises ValueError when the checkpoint is of another model, naming what differs."""
    model = _config(hf_config)
    if _hash(model) == manifest.model_hash:
        return
    ours, theirs = _identity(model), _identity(manifest.model)
    names = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    shown = ", ".join(f"{n} is {theirs.get(n)} there and {ours.get(n)} here" for n in names[:6])
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    raise ValueError(
        f"checkpoint {path} is of another model: {shown}{more}. Set model.path or model.hf_config to that model, or "
        "choose another run directory"
    )


def check_lora(manifest: Manifest, lora: LoraConfig | None, path: Path) -> None:
    """Raises ValueError unless a run with this model.lora can go on from the checkpoint."""
    theirs = {name: value for name, value in (manifest.lora or {}).items() if name != "base"}
    ours = {} if lora is None else _lora_settings(lora)
    if ours != theirs:
        raise ValueError(
            f"checkpoint {path} was trained with {_said(theirs)}, this run has {_said(ours)}: set model.lora to what it "
            "was, or choose another run directory"
        )


def check_start(manifest: Manifest, lora: LoraConfig | None, path: Path) -> None:
    """Raises ValueError when the checkpoint holds adapters alone, and not those that this model.lora wants."""
    if manifest.lora is not None and lora is None:
        raise ValueError(
            f"model.start_from: checkpoint {path} holds adapters alone, without the model: set model.lora to what it was, "
            "or export that run with checkpoint.export_merged and set model.path to the exported folder"
        )
    if manifest.lora is not None:
        check_lora(manifest, lora, path)


def check_base(manifest: Manifest, base: str, path: Path) -> None:
    """Raises ValueError when the checkpoint's adapters belong to a model with other weights than ``base`` identifies."""
    if manifest.lora is not None and manifest.lora["base"] != base:
        raise ValueError(
            f"checkpoint {path} holds adapters of a model with other weights: set model.path (or model.start_from, or the "
            "seed of random weights) and model.dtype to what they were trained on"
        )


def _lora_settings(lora: LoraConfig) -> dict[str, Any]:
    return lora.model_dump(mode="json")


def _said(lora: Mapping[str, Any]) -> str:
    return "adapters (" + ", ".join(f"{k} {v}" for k, v in lora.items()) + ")" if lora else "no adapters"


def torn(run_dir: str | Path) -> list[Path]:
    """Folders that a killed run left half written or half removed."""
    return sorted((Path(run_dir) / "checkpoints").glob(f"step_*{PARTIAL}"))


def prune(run_dir: str | Path, keep_last: int) -> None:
    """Remove all complete checkpoints but the newest ``keep_last`` (at least 1)."""
    for path in complete(run_dir)[: -max(keep_last, 1)]:
        remove(path)


def remove(path: Path) -> None:
    """Remove a folder; killed in the middle, what is left is no checkpoint."""
    if not path.exists():
        return
    if not path.name.endswith(PARTIAL):
        doomed = path.with_name(path.name + PARTIAL)
        shutil.rmtree(doomed, ignore_errors=True)
        path = path.rename(doomed)
    shutil.rmtree(path)


def rename(partial: Path, target: Path) -> None:
    """Give a whole checkpoint its final name, for good."""
    partial.rename(target)
    flush(target.parent)


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def _config(hf_config: PretrainedConfig) -> dict[str, Any]:
    return json.loads(hf_config.to_json_string(use_diff=False))


def _identity(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name not in NOT_IDENTITY}


def _hash(model: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(_identity(model), sort_keys=True).encode()).hexdigest()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps(values, indent=1))
    flush(draft)
    draft.rename(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """To the disk, not only to the system's memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

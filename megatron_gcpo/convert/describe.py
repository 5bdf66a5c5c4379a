"""What a checkpoint is, without reading its weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_gcpo.convert import hf_folder, megatron_folder, torch_dist
from megatron_gcpo.policy import manifest as manifests


@dataclass(frozen=True, kw_only=True)
class Tensor:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_chunks: int
    """Pieces in which it is stored."""


@dataclass(frozen=True, kw_only=True)
class Description:
    path: Path
    format: str
    """"Hugging Face" or "Megatron torch_dist"."""
    model_type: str | None
    """None: the folder does not say."""
    num_files: int
    tensors: tuple[Tensor, ...]
    """Weights alone."""
    notes: tuple[str, ...]
    """Step, layout, versions: one line each."""

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors)

    @property
    def dtypes(self) -> dict[str, int]:
        """Parameters of each type, most first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[str(tensor.dtype).removeprefix("torch.")] += math.prod(tensor.shape)
        return dict(counts.most_common())


def describe(path: str | Path, *, allow_pickle: bool = False) -> Description:
    """Read headers and tables only. Raises ValueError when there is no checkpoint, or it is damaged."""
    path = Path(path)
    if path.is_dir() and not torch_dist.is_torch_dist(path) and hf_folder.holds_weights(path):
        return _hugging_face(path, allow_pickle)
    return _megatron(path)


def _hugging_face(path: Path, allow_pickle: bool) -> Description:
    folder = hf_folder.open_folder(path, allow_pickle=allow_pickle)
    config = folder.config
    return Description(
        path=path,
        format="Hugging Face",
        model_type=config.model_type,
        num_files=len({entry.file for entry in folder.entries.values()}),
        tensors=tuple(
            Tensor(name=e.name, dtype=e.dtype, shape=e.shape, num_chunks=1)
            for e in sorted(folder.entries.values(), key=_key)
        ),
        notes=(f"beside the weights: {', '.join(file.name for file in folder.carried())}",),
    )


def _megatron(path: Path) -> Description:
    manifest = None
    if not torch_dist.is_torch_dist(path) or (path / manifests.NAME).is_file():
        path = manifests.resolve(path)
        manifest = manifests.read(path)
    everything = torch_dist.read_tensors(path)
    weights = [t for key, t in sorted(everything.items()) if not key.startswith(megatron_folder.NO_WEIGHTS)]
    notes = [f"{len(everything) - len(weights)} tensors besides, of the optimizer and the like"]
    if manifest is not None:
        sizes = ", ".join(f"{name} {size}" for name, size in manifest.layout.items() if size > 1) or "one process"
        notes += [
            f"step {manifest.step}, {manifest.dtype}, written on: {sizes}",
            "written with " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
            f"{len(manifest.sha256)} of {len(manifest.files)} files have a sha256 in the manifest",
        ]
    return Description(
        path=path,
        format="Megatron torch_dist",
        model_type=None if manifest is None else manifest.model["model_type"],
        num_files=len({chunk.file for tensor in weights for chunk in tensor.chunks}),
        tensors=tuple(Tensor(name=t.key, dtype=t.dtype, shape=t.shape, num_chunks=len(t.chunks)) for t in weights),
        notes=tuple(notes),
    )


def _key(entry: hf_folder.Entry) -> tuple[str, int]:
    return str(entry.file), entry.begin

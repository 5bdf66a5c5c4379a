"""A Hugging Face checkpoint folder, opened with suspicion: which tensors it has, where, and what travels beside them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_gcpo.convert import safetensors_io
from megatron_gcpo.convert.safetensors_io import Entry
from megatron_gcpo.policy.hf_config import UNREADABLE

log = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
CARRIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*", "README*", "USE_POLICY*")
"""Files that belong to a checkpoint beside its weights; never code."""
NOT_CARRIED = ("*.index.json", "manifest.json", "adapter_config.json")
PICKLE_RISK = (
    "PyTorch's .bin files are pickles, and a pickle can run any program when it is opened. Ask for safetensors; if you "
    "trust whoever wrote these files, pass --allow-pickle"
)


@dataclass(frozen=True, kw_only=True)
class HfFolder:
    """A whole checkpoint on disk."""

    path: Path
    config: PretrainedConfig
    entries: dict[str, Entry]
    """By name; of a pickled file the place is unknown (begin = -1)."""

    def read(self, name: str) -> torch.Tensor:
        """A tensor in memory of its own. Raises ValueError, naming file and tensor, when it holds NaN or infinity."""
        entry = self.entries[name]
        tensor = safetensors_io.read_tensor(entry) if entry.begin >= 0 else self._pickled(entry)
        check_finite(tensor, f"{entry.file}: tensor {name!r}")
        return tensor

    def carried(self) -> list[Path]:
        return carried_files(self.path)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    def _pickled(self, entry: Entry) -> torch.Tensor:
        return _load_pickle(entry.file)[entry.name].clone()

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Reads on access."""
        return _Reading(self)


class _Reading(Mapping[str, torch.Tensor]):
    def __init__(self, folder: HfFolder) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.folder.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.folder.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.folder.entries)

    def __len__(self) -> int:
        return len(self.folder.entries)


def open_folder(path: str | Path, *, allow_pickle: bool = False) -> HfFolder:
    """The checkpoint in a folder, every header read and checked.

    Raises ValueError, naming file and tensor, when it is no checkpoint, is pickled (unless allowed), or is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is no folder: name a Hugging Face checkpoint on this machine")
    return HfFolder(path=path, config=read_config(path), entries=_entries(path, allow_pickle))


def holds_weights(path: Path) -> bool:
    """Whether this is the folder of a Hugging Face checkpoint, in whichever format."""
    return any((path / name).is_file() for name in (WEIGHTS, INDEX, *PICKLES))


def read_config(path: Path) -> PretrainedConfig:
    """The config, naming its causal-LM class; code in the folder is never run."""
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    except UNREADABLE as error:
        first = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path / 'config.json'}: no model config can be read there ({first})") from None
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{path / 'config.json'}: {config.model_type!r} is no causal language model of transformers")
    if not config.architectures:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def carried_files(path: Path) -> list[Path]:
    """Config, tokenizer, generation config, template and licence files of a folder."""
    found = {file for pattern in CARRIED for file in path.glob(pattern) if file.is_file()}
    return sorted(file for file in found if not any(file.match(pattern) for pattern in NOT_CARRIED))


def _entries(path: Path, allow_pickle: bool) -> dict[str, Entry]:
    if (path / INDEX).is_file():
        return _indexed(path)
    if (path / WEIGHTS).is_file():
        return safetensors_io.read_entries(path / WEIGHTS)
    pickles = sorted(path.glob("pytorch_model*.bin"))
    if not pickles:
        raise ValueError(f"{path} has neither {WEIGHTS} nor {INDEX}: it is no Hugging Face checkpoint")
    if not allow_pickle:
        raise ValueError(f"{path} holds pickled weights ({pickles[0].name}): {PICKLE_RISK}")
    log.warning("opening pickled weights of %s, as asked; only tensors are taken from them", path)
    return {
        name: Entry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), file=file, begin=-1)
        for file in pickles
        for name, tensor in _load_pickle(file).items()
    }


def _indexed(path: Path) -> dict[str, Entry]:
    index = path / INDEX
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{index} cannot be read: {type(error).__name__}: {error}") from None
    entries: dict[str, Entry] = {}
    for file_name in sorted(set(names.values())):
        for name, entry in safetensors_io.read_entries(_inside(path, index, file_name)).items():
            if name in entries:
                raise ValueError(f"{entry.file}: tensor {name!r} is in {entries[name].file.name} too")
            if names.get(name) != file_name:
                raise ValueError(f"{entry.file}: tensor {name!r} is extra, {index.name} does not place it there")
            entries[name] = entry
    for name, file_name in names.items():
        if name not in entries:
            raise ValueError(f"{path / file_name}: tensor {name!r} is missing, {index.name} places it there")
    return entries


def _inside(path: Path, index: Path, file_name: str) -> Path:
    """The file that an index names, which must be one of its own folder."""
    if Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
        raise ValueError(f"{index} names the file {file_name!r}: only safetensors files of the same folder are opened")
    file = path / file_name
    if not file.is_file():
        raise ValueError(f"{file} is missing, {index.name} names it")
    return file


def _load_pickle(file: Path) -> dict[str, torch.Tensor]:
    """Mapped, and by the unpickler that builds tensors only: even a trusted file runs nothing."""
    try:
        loaded: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # what a broken pickle raises is anything
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{file} cannot be opened as a file of tensors: {first}") from None
    if not isinstance(loaded, dict) or not all(torch.is_tensor(tensor) for tensor in loaded.values()):
        raise ValueError(f"{file} holds more than a table of tensors")
    return loaded


def check_finite(tensor: torch.Tensor, what: str) -> None:
    """Raises ValueError for NaN or infinity; a sum is finite only when every element is, so most pay for one pass."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        return
    if torch.isfinite(tensor.sum()):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise ValueError(f"{what} holds {bad} values that are NaN or infinite: the checkpoint is damaged")

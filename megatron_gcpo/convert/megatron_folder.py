"""A Megatron checkpoint on disk, seen through a skeleton as the Hugging Face tensors it stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from megatron_gcpo.convert import torch_dist
from megatron_gcpo.convert.hf_folder import carried_files, check_finite, read_config
from megatron_gcpo.convert.hf_writer import Spec
from megatron_gcpo.convert.skeleton import Parameter, Part, Skeleton, Unit
from megatron_gcpo.convert.to_megatron import CARRIED, TIED
from megatron_gcpo.convert.torch_dist import GlobalTensor
from megatron_gcpo.policy import manifest as manifests
from megatron_gcpo.policy.options import DTYPES

NO_WEIGHTS = ("optimizer.", "rng_state", "random", "rerun_state_machine", "opt_param_scheduler")
"""How keys begin that are no weights."""


@dataclass(frozen=True, kw_only=True)
class MegatronFolder:
    path: Path
    config: PretrainedConfig
    manifest: manifests.Manifest | None
    """None: the folder was not written by us."""
    tensors: dict[str, GlobalTensor]
    """Weights alone, by key."""
    tied: dict[str, str]
    """Hugging Face tensors that repeat another one -> that other one."""
    carried: tuple[Path, ...]
    """What came beside the weights of the Hugging Face folder that it was made from."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def open_folder(path: str | Path, reference: str | Path | None = None) -> MegatronFolder:
    """A checkpoint, the newest one of a run, or the torch_dist folder of another program.

    reference: a Hugging Face folder whose config and tokenizer count instead of those kept in the checkpoint.

    Raises ValueError when there is none, it is damaged, or nothing says which model it is of.
    """
    path = Path(path)
    manifest = None
    if not torch_dist.is_torch_dist(path) or (path / manifests.NAME).is_file():
        path = manifests.resolve(path)
        manifest = manifests.read(path)
        if manifest.lora is not None:
            raise ValueError(
                f"{path} holds adapters alone, without the model: export that run's merged weights instead"
            )
    if manifest is None and reference is None:
        raise ValueError(
            f"{path} does not say which model it is of: name a Hugging Face folder of that model with --hf"
        )
    config = read_config(Path(reference)) if reference is not None else _config_of(manifest)
    if manifest is not None and reference is not None:
        manifests.check_model(manifest, config, path)
    kept = path / CARRIED
    source = Path(reference) if reference is not None else kept
    tied = json.loads((kept / TIED).read_text()) if (kept / TIED).is_file() else {}
    tensors = torch_dist.read_tensors(path)
    return MegatronFolder(
        path=path,
        config=config,
        manifest=manifest,
        tensors={key: tensor for key, tensor in tensors.items() if not key.startswith(NO_WEIGHTS)},
        tied=tied,
        carried=tuple(file for file in carried_files(source) if file.name != TIED),
    )


def _config_of(manifest: manifests.Manifest | None) -> PretrainedConfig:
    assert manifest is not None, "got no manifest, expected a checkpoint of ours"
    values = dict(manifest.model)
    return AutoConfig.for_model(values.pop("model_type"), **values)


@dataclass(frozen=True, kw_only=True)
class HfView:
    """The Hugging Face tensors of a Megatron checkpoint, translated as they are asked for."""

    folder: MegatronFolder
    skeleton: Skeleton
    dtype: str | None = None
    """What to cast weights to; None: as they are stored."""

    def check(self) -> None:
        """Raises ValueError when the folder's tensors are not exactly those of the model."""
        wanted = {part.key for unit in self.skeleton.units for p in unit.parameters for part in p.parts}
        model = self.folder.config.model_type
        for unit in self.skeleton.units:
            for parameter in unit.parameters:
                for part in parameter.parts:
                    self._check_part(part)
        extra = sorted(key for key in self.folder.tensors if key not in wanted)
        if extra:
            raise ValueError(
                f"{self.folder.path}: tensor {extra[0]!r} is extra: a {model} model of this config has no such tensor"
                + (f" (and {len(extra) - 1} more)" if len(extra) > 1 else "")
            )

    def _check_part(self, part: Part) -> None:
        model = self.folder.config.model_type
        tensor = self.folder.tensors.get(part.key)
        if tensor is None:
            raise ValueError(
                f"{self.folder.path}: tensor {part.key!r} is missing, a {model} model of this config has it"
            )
        fits = len(tensor.shape) == len(part.shape) and (
            tensor.shape == part.shape or (_is_vocabulary(part) and tensor.shape >= part.shape)
        )
        if not fits:
            raise ValueError(
                f"{self.folder.path}: tensor {part.key!r} has shape {list(tensor.shape)}, a {model} model of this config "
                f"has {list(part.shape)}"
            )

    def specs(self, unit: Unit) -> list[Spec]:
        """The tensors a unit becomes; needs a skeleton that is still on the meta device."""
        values = (torch.empty(p.shape, dtype=self._dtype(p), device="meta") for p in unit.parameters)
        translated = self.skeleton.to_hf(unit, values)
        return [Spec(name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in translated.items()]

    def tensors(self, unit: Unit) -> dict[str, torch.Tensor]:
        """By name. Raises ValueError, naming file and tensor, for what is damaged, NaN or infinite."""
        return self.skeleton.to_hf(unit, self._values(unit))

    def _values(self, unit: Unit) -> Iterator[torch.Tensor]:
        for parameter in unit.parameters:
            whole = torch.empty(parameter.shape, dtype=self.folder.tensors[parameter.parts[0].key].dtype)
            values = parameter.split(whole)
            for part, value in zip(parameter.parts, values, strict=True):
                torch_dist.read_box(self.folder.tensors[part.key], (part.offset, part.size), value)
                check_finite(value, f"{self.folder.path}: tensor {part.key!r} at {list(part.offset)}")
            in_place = all(v.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for v in values)
            yield (whole if in_place else parameter.join(values)).to(self._dtype(parameter))

    def _dtype(self, parameter: Parameter) -> torch.dtype:
        stored = self.folder.tensors[parameter.parts[0].key].dtype
        return stored if self.dtype is None or parameter.keeps_fp32 else DTYPES[self.dtype]


def _is_vocabulary(part: Part) -> bool:
    """Tensors whose first axis may be padded so that ranks share it."""
    return part.key.endswith(("word_embeddings.weight", "output_layer.weight"))

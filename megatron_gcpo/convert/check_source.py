"""Whether a Hugging Face folder holds exactly the tensors of its model, known before one of them is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron_gcpo.convert.hf_folder import HfFolder
from megatron_gcpo.convert.skeleton import Parameter, Skeleton

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BUFFERS = re.compile(r"(\.|^)(rotary_emb\.inv_freq|masked_bias)$")
"""Tensors that old files of transformers hold beside the weights; every model computes them."""


def refuse_quantised(folder: HfFolder) -> None:
    quantised = folder.config.to_dict().get("quantization_config")
    if quantised:
        raise ValueError(
            f"{folder.path / 'config.json'}: the weights are quantised ({quantised.get('quant_method', 'unknown method')}): "
            "convert a bf16 version of the model"
        )


def check_tensors(skeleton: Skeleton, folder: HfFolder, leave_out: Sequence[str]) -> dict[str, str]:
    """Whether the folder holds exactly the tensors of the model, in the right shapes; tensors that repeat tied ones.

    Raises ValueError naming the file and the first tensors that are missing, extra or wrong.
    """
    read: set[str] = set()
    for unit in skeleton.units:
        for parameter in unit.parameters:
            read |= _check_parameter(skeleton, parameter, folder)
    extra = sorted(
        name
        for name in folder.entries.keys() - read
        if not BUFFERS.search(name) and not any(re.search(pattern, name) for pattern in leave_out)
    )
    tied = {name: other for name in extra if (other := _repeated(skeleton, folder, name)) is not None}
    extra = [name for name in extra if name not in tied]
    if extra:
        raise ValueError(
            f"{folder.entries[extra[0]].file}: tensor {extra[0]!r} is extra: a {folder.config.model_type} model of this config "
            f"has no such tensor{_and_more(extra)}; --leave-out PATTERN converts without it"
        )
    return tied


class MetaTensors(Mapping[str, torch.Tensor]):
    """The folder's tensors without their values; notes which were asked for."""

    def __init__(self, folder: HfFolder) -> None:
        self.entries = folder.entries
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        self.read.add(name)
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _check_parameter(skeleton: Skeleton, parameter: Parameter, folder: HfFolder) -> set[str]:
    """The tensors that the parameter is made of."""
    meta = MetaTensors(folder)
    names = parameter.mapping.hf_param
    names = [names] if isinstance(names, str) else list(names.values())
    shapes = {n: list(folder.entries[n].shape) for n in names if n in folder.entries}
    try:
        shape = tuple(skeleton.to_megatron(parameter, meta).shape)
    except KeyError:
        missing = sorted(name for name in names if name not in folder.entries)
        raise ValueError(
            f"{folder.path}: tensor {missing[0]!r} is missing, a {folder.config.model_type} model of this config has it"
            f"{_and_more(missing)}"
        ) from None
    except (RuntimeError, AssertionError, ValueError, IndexError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{folder.entries[next(iter(shapes))].file}: the shapes {shapes} do not fit the config of {folder.path} ({first})"
        ) from None
    if shape != parameter.shape:
        raise ValueError(
            f"{folder.entries[next(iter(shapes))].file}: the shapes {shapes} do not fit the config of {folder.path}: together "
            f"they make {list(shape)}, the model has {list(parameter.shape)}"
        )
    for name in meta.read:
        entry = folder.entries[name]
        if entry.dtype not in FLOATS:
            raise ValueError(
                f"{entry.file}: tensor {name!r} has type {str(entry.dtype).removeprefix('torch.')}; weights are converted "
                "from float32, bfloat16 or float16: dequantise the checkpoint first"
            )
    return meta.read


def _repeated(skeleton: Skeleton, folder: HfFolder, name: str) -> str | None:
    """The tensor that a tied model's extra one repeats bit for bit, if it does."""
    if not skeleton.model.share_embeddings_and_output_weights or not name.endswith("lm_head.weight"):
        return None
    (other,) = [
        p.mapping.hf_param
        for unit in skeleton.units
        for p in unit.parameters
        if p.name == "embedding.word_embeddings.weight"
    ]
    a, b = folder.entries[name], folder.entries[other]
    same = a.shape == b.shape and a.dtype == b.dtype and torch.equal(folder.read(name), folder.read(other))
    if not same:
        raise ValueError(
            f"{a.file}: tensor {name!r} differs from {other!r}, but the config ties them (tie_word_embeddings): set that to "
            f"false, or convert without it (--leave-out '{name}')"
        )
    return other


def _and_more(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[1:4])
    return (f" (and {shown}" + (f" and {len(names) - 4} more)" if len(names) > 4 else ")")) if len(names) > 1 else ""

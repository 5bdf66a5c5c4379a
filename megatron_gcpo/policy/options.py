"""Megatron-Core's own option names: what of them a configuration section may set, and what it may not."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_gcpo.names import nearest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def checked(
    section: str, given: Mapping[str, Any], target: Callable[..., Any], reserved: Mapping[str, str]
) -> dict[str, Any]:
    """The options of one pass-through section, with the names of dtypes ("fp32", "bf16") turned into dtypes.

    section: its place in the configuration, for messages.  target: the dataclass or class whose options they are.
    reserved: options that are decided elsewhere -> the field that decides them.

    Raises ValueError for a name that target does not have (with the nearest one) or that is reserved.
    """
    valid = option_names(target)
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in reserved:
            raise ValueError(f"{section}.{name} is decided by {reserved[name]}: set that instead")
        if name not in valid:
            near = nearest(name, valid - reserved.keys(), cutoff=0.0)
            raise ValueError(f"{section}.{name} is not an option of Megatron's {target.__name__}: did you mean {near}?")
        options[name] = DTYPES.get(value, value) if name.endswith("_dtype") and isinstance(value, str) else value
    return options


def option_names(target: Callable[..., Any]) -> set[str]:
    """Names of the fields of a dataclass, or of the parameters of a constructor."""
    if dataclasses.is_dataclass(target):
        return {f.name for f in dataclasses.fields(target) if f.init and not f.name.startswith("_")}
    return set(inspect.signature(target).parameters)

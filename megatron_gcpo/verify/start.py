"""What a worker is told first, and how a verifier is found."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_gcpo.verify.base import Verifier

ID_BYTES = 16
"""Every request starts with this many random bytes, which only the reply to it repeats."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first request: what to be."""

    module: str
    """Module name of the verifier, or path of its .py file."""
    attribute: str
    options: dict[str, Any]
    evaluates: bool
    """The verifier may run what the model wrote: one judge per sample."""
    timeout_s: float
    memory_bytes: int
    trainer_pid: int


def load(module: str, attribute: str) -> type[Verifier]:
    """The verifier class of a module, given by name or by the path of its file."""
    if not module.endswith(".py"):
        return vars(importlib.import_module(module))[attribute]
    return vars(_load_file(Path(module)))[attribute]


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, f"got {path}, expected a Python file"
    assert spec.loader is not None, f"got {path}, expected a Python file"
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded

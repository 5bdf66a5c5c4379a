"""What a job of submitit does wherever it lands. Every task of it imports this file and no more."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG = "ablation.log"
"""In the folder of a run: what it printed when it last ran."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run. submitit pickles it, and calls ``checkpoint`` when time is up: once requeued, the run goes on."""

    command: Sequence[str]
    folder: Path

    def __call__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if submitit().JobEnvironment().global_rank == 0:
            with (self.folder / LOG).open("wb") as log:
                code = subprocess.run(self.command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        else:  # to the log of this task, which submitit keeps
            code = subprocess.run(self.command, check=False).returncode
        if code:
            raise RuntimeError(f"exit code {code}: {last_words(self.folder)}")

    def checkpoint(self) -> Any:
        return submitit().helpers.DelayedSubmission(self)


def last_words(folder: Path) -> str:
    """The last error line of a run's log, else its last line; nothing when there is none."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    errors = [line for line in lines if line.startswith("error")]
    said = next(iter(errors[-1:] or [line for line in lines if line.strip()][-1:]), "")
    return f"{said.strip()[:300]} ({path})" if said else ""


def submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError:
        raise ValueError("--slurm needs the package submitit: pip install 'megatron-gcpo[ablate]'") from None

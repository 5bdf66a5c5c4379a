"""Run the cells that are not finished, on this machine or through Slurm; a cell that fails stops nobody else."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gcpo.ablate.grid import AblationConfig, Cell, override, warm_start_folder
from megatron_gcpo.observe.history import read_history

TRAIN = (sys.executable, "-m", "megatron_gcpo.cli", "train")
LOG = "ablation.log"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A cell that did not finish, and its last words."""

    cell: Cell
    reason: str


def is_finished(folder: Path) -> bool:
    try:
        return read_history(folder).finished
    except ValueError:  # not begun
        return False


def command(ablation: AblationConfig, cell: Cell, root: Path, train: Sequence[str] = TRAIN) -> list[str]:
    return [*train, ablation.recipe, *cell.overrides(ablation, root)]


def warm_starts(ablation: AblationConfig, root: Path, train: Sequence[str] = TRAIN) -> list[list[str]]:
    """The commands of what the cells start from; finished ones end at once."""
    if ablation.warm_start is None:
        return []
    varied = ablation.warm_start_for
    if varied is None:
        return [[*train, ablation.warm_start]]
    return [
        [*train, ablation.warm_start, override(varied, value), f"run.output_dir={warm_start_folder(root, value)}"]
        for value in ablation.grid[varied]
    ]


def run_here(
    ablation: AblationConfig,
    cells: Sequence[Cell],
    root: Path,
    say: Callable[[str], None],
    *,
    train: Sequence[str] = TRAIN,
) -> list[Failure]:
    """All unfinished cells, ``ablation.at_once`` side by side. Every process has ended on return, also on an exception."""
    waiting = [cell for cell in cells if not is_finished(cell.folder(root))]
    total, failures = len(waiting), []
    running: dict[int, tuple[Cell, subprocess.Popen[bytes]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < ablation.at_once:
                cell = waiting.pop(0)
                process = _start(command(ablation, cell, root, train), cell.folder(root))
                running[process.pid] = (cell, process)
            for pid, (cell, process) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[pid]
                finished = process.returncode == 0 and is_finished(cell.folder(root))
                if not finished:
                    failures.append(Failure(cell=cell, reason=last_words(cell.folder(root), process.returncode)))
                done = total - len(waiting) - len(running)
                say(f"[{done}/{total}] {cell.name} seed {cell.seed}: {'finished' if finished else failures[-1].reason}")
            time.sleep(0.2)
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()
    return failures


def _start(arguments: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("wb") as log:
        return subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def last_words(folder: Path, code: int) -> str:
    """The last error line of a cell's log, else its last line."""
    path = folder / LOG
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    errors = [line for line in lines if line.startswith("error")]
    said = next(iter(errors[-1:] or [line for line in lines if line.strip()][-1:]), "nothing was said")
    return f"exit code {code}: {said.strip()[:300]} ({path})"


def submit(
    ablation: AblationConfig,
    cells: Sequence[Cell],
    root: Path,
    parameters: Mapping[str, Any],
    *,
    train: Sequence[str] = TRAIN,
    cluster: str = "slurm",
) -> list[Any]:
    """Hand all unfinished cells to Slurm through submitit, as one array; returns its jobs.

    Args:
        parameters: of ``submitit.AutoExecutor.update_parameters``, verbatim (nodes, gpus_per_node, timeout_min,
            slurm_partition, slurm_array_parallelism, ...).
        cluster: "slurm", or "local" to try it out on this machine.

    Raises:
        ValueError: submitit is not installed.
    """
    try:
        submitit: Any = importlib.import_module("submitit")
    except ImportError:
        raise ValueError("--slurm needs the package submitit: pip install 'megatron-gcpo[ablate]'") from None
    executor = submitit.AutoExecutor(folder=str(root / "slurm" / "%j"), cluster=cluster)
    executor.update_parameters(name=ablation.name, **parameters)
    waiting = [cell for cell in cells if not is_finished(cell.folder(root))]
    with executor.batch():
        jobs = [
            executor.submit(submitit.helpers.CommandFunction(command(ablation, cell, root, train))) for cell in waiting
        ]
    return jobs

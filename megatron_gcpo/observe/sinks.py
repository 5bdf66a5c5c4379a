"""Where metrics go: metrics.jsonl always, TensorBoard by default, W&B and MLflow when asked for."""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_gcpo.config.records import Config


class Sink(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object per line; a line is complete or absent, so a killed run leaves a readable file."""

    def __init__(self, path: Path, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_after(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}  # JSON has no NaN
        self._file.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every complete line of a metrics file; a torn last line, left by a kill, is passed over."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return rows


def _drop_after(path: Path, resume_step: int) -> None:
    """Steps that ran after the checkpoint we resume from will run again: keep one record of each."""
    rows = read_metrics(path)
    kept = [row for row in rows if row["step"] <= resume_step]
    if path.is_file():
        replacement = path.with_suffix(".tmp")
        replacement.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        replacement.replace(path)


class TensorBoard:
    def __init__(self, folder: Path, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    def __init__(self, arguments: dict[str, Any], config: Config) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(**{"name": config.run.name, "resume": "allow", **arguments}, config=config.model_dump())

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    def __init__(self, arguments: dict[str, Any], config: Config) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        if "tracking_uri" in arguments:
            self._mlflow.set_tracking_uri(arguments["tracking_uri"])
        self._mlflow.set_experiment(arguments.get("experiment", "megatron_gcpo"))
        self._mlflow.start_run(run_name=config.run.name)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def open_sinks(config: Config, run_dir: Path, resume_step: int) -> list[Sink]:
    """The sinks a configuration asks for; records of steps after ``resume_step`` are dropped from local files."""
    sinks: list[Sink] = [JsonLines(run_dir / "metrics.jsonl", resume_step)]
    if config.observe.tensorboard:
        sinks.append(TensorBoard(run_dir / "tensorboard", resume_step))
    if config.observe.wandb is not None:
        sinks.append(WandB(config.observe.wandb, config))
    if config.observe.mlflow is not None:
        sinks.append(MLflow(config.observe.mlflow, config))
    return sinks

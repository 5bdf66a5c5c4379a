"""Whether a run begins or goes on: asked before any process starts, and again by every run itself."""

from __future__ import annotations

from pathlib import Path

from megatron_gcpo.config.records import Config
from megatron_gcpo.observe.summary import Summary
from megatron_gcpo.policy import manifest


def find_checkpoint(config: Config, folder: Path) -> Path | None:
    """The checkpoint that the run goes on from; None: it begins.

    Raises:
        ValueError: run.resume does not allow the one or the other.
    """
    newest = manifest.newest(folder)
    if newest is None and config.run.resume == "must":
        raise ValueError(f"run.resume is must, but {folder} holds no complete checkpoint: set it to auto")
    if newest is not None and config.run.resume == "never":
        raise ValueError(
            f"{folder} already holds {newest.name}, and run.resume is never: choose another run.output_dir, or auto"
        )
    return newest


def check_continuation(config: Config, folder: Path, summary: Summary, data: str) -> None:
    """Refuse to go on with another data set or beyond the end.

    Args:
        summary: of the checkpoint.
        data: fingerprint of the prompts that data.train gives now.

    Raises:
        ValueError: what differs and what to do.
    """
    if summary.data != data:
        raise ValueError(
            f"{folder} was trained on other prompts than data.train gives now: continuing would repeat some and skip "
            "others; restore the data, or start in another run.output_dir"
        )
    if summary.step > config.run.steps:
        raise ValueError(
            f"{folder} has done {summary.step} steps already, more than run.steps {config.run.steps}: raise it"
        )

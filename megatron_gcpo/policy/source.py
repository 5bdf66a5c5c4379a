"""What a path to start from points to; known without Megatron-Core."""

from __future__ import annotations

from pathlib import Path

from megatron_gcpo.policy.manifest import NAME

TRACKER = "latest_checkpointed_iteration.txt"
"""In the folder above the iterations of another trainer's run: which one is the newest."""


def find_foreign(path: str | Path) -> Path | None:
    """The folder of a torch_dist checkpoint that is none of ours; None when ``path`` leads to none."""
    path = Path(path)
    tracker = path / TRACKER
    if tracker.is_file():
        newest = tracker.read_text(encoding="utf-8").strip()
        path = path / (f"iter_{int(newest):07d}" if newest.isdigit() else newest)
    is_checkpoint = (path / ".metadata").is_file() and (path / "metadata.json").is_file()
    return path if is_checkpoint and not (path / NAME).is_file() else None

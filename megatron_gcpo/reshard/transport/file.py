"""Files on a folder that both ends see: slow, and works where nothing else does."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_gcpo.reshard.transport.base import NUM_SLOTS, Section


class FileOutlet:
    shared_path = None

    def __init__(self, bucket_bytes: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = tempfile.TemporaryDirectory(prefix="push-", dir=folder)
        self.slots = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
        self.paths: list[Path | None] = [None] * NUM_SLOTS
        self.count = itertools.count()

    def init_info(self) -> dict[str, Any]:
        return {}

    def connect(self) -> None:
        pass

    def connected(self) -> None:
        pass

    def message(self, slot: int, sections: Mapping[str, Section]) -> dict[str, Any]:
        """Writes the bucket: a file system orders nothing, so it is there before anybody is told of it."""
        self._forget(slot)
        path = Path(self.folder.name) / f"bucket{next(self.count)}"
        end = max((s.offset + s.num_bytes for s in sections.values()), default=0)
        self.slots[slot][:end].numpy().tofile(path)
        self.paths[slot] = path
        return {"path": str(path), "sections": sections}

    def send(self, slot: int, sections: Mapping[str, Section]) -> None:
        pass

    def close(self) -> None:
        self.folder.cleanup()
        self.slots = []

    def _forget(self, slot: int) -> None:
        path = self.paths[slot]
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


class FileInlet:
    def __init__(self, info: Mapping[str, Any], worker: str) -> None:
        self.worker = worker

    def receive(self, message: Mapping[str, Any]) -> torch.Tensor:
        offset, num_bytes = message["sections"][self.worker]
        try:
            section = np.fromfile(message["path"], dtype=np.uint8, count=num_bytes, offset=offset)
        except OSError as error:
            raise ValueError(
                f"the pusher's file {message['path']} is not seen from the engine's machine ({error}): with "
                "rollout.push.transport file, run.output_dir must lie on a file system that both share"
            ) from error
        if len(section) != num_bytes:
            raise ValueError(f"{message['path']} holds {len(section)} of {num_bytes} bytes")
        return torch.from_numpy(section)

    def close(self) -> None:
        pass

"""Shared memory of one machine: the buffers are mapped by everybody, and only their place is told.

The file in /dev/shm is unlinked as soon as all have opened it, so that nothing stays behind when a process is killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_gcpo.reshard.transport.base import NUM_SLOTS, Section

FOLDER = "/dev/shm"


def fits(bucket_bytes: int) -> bool:
    """Whether this machine's shared memory has room for the buffers; writing beyond it would end the process."""
    room = os.statvfs(FOLDER)
    return NUM_SLOTS * bucket_bytes <= room.f_bavail * room.f_frsize


class ShmOutlet:
    def __init__(self, bucket_bytes: int) -> None:
        if not fits(bucket_bytes):
            raise ValueError(
                f"{FOLDER} has no room for {NUM_SLOTS} buckets of {bucket_bytes} bytes: lower rollout.push.bucket_bytes, "
                "make it larger (docker run --shm-size), or set rollout.push.transport to gloo"
            )
        descriptor, self.shared_path = tempfile.mkstemp(prefix="megatron_gcpo-", dir=FOLDER)
        os.ftruncate(descriptor, NUM_SLOTS * bucket_bytes)
        os.close(descriptor)
        self.slots = map_slots(self.shared_path, bucket_bytes)
        self.bucket_bytes = bucket_bytes

    def init_info(self) -> dict[str, Any]:
        return {"path": self.shared_path, "bucket_bytes": self.bucket_bytes}

    def connect(self) -> None:
        pass

    def connected(self) -> None:
        self._unlink()

    def message(self, slot: int, sections: Mapping[str, Section]) -> dict[str, Any]:
        return {"slot": slot, "sections": sections}

    def send(self, slot: int, sections: Mapping[str, Section]) -> None:
        pass

    def close(self) -> None:
        self._unlink()
        self.slots = []

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            Path(self.shared_path).unlink()


class ShmInlet:
    def __init__(self, info: Mapping[str, Any], worker: str) -> None:
        self.worker = worker
        self.slots = map_slots(info["path"], info["bucket_bytes"])

    def receive(self, message: Mapping[str, Any]) -> torch.Tensor:
        offset, num_bytes = message["sections"][self.worker]
        return self.slots[message["slot"]][offset : offset + num_bytes]

    def close(self) -> None:
        self.slots = []


def map_slots(path: str, bucket_bytes: int) -> list[torch.Tensor]:
    """The buffers in this file. Raises ValueError when it cannot be mapped from here."""
    try:
        with Path(path).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), NUM_SLOTS * bucket_bytes)
    except OSError as error:
        raise ValueError(
            f"the pusher's shared memory {path} is not here ({error}): is the engine on another machine? Set "
            "rollout.push.transport to gloo (CPU) or nccl (CUDA)"
        ) from error
    # The tensors keep the mapping alive; without copy-on-write they are written through.
    return list(torch.frombuffer(mapped, dtype=torch.uint8).split(bucket_bytes))

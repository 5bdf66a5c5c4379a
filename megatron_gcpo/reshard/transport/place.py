"""Where a process is, as far as it decides how bytes can reach it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """The same for all processes that share memory through /dev/shm."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
    return f"{boot}:{Path('/dev/shm').stat().st_dev}"


def process_id() -> str:
    return f"{host_id()}:{os.getpid()}"


def gpu_id(device: torch.device) -> str | None:
    """Of the physical GPU; None: the device is none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None

"""Which transport, by name."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_gcpo.reshard.transport.base import Inlet, Outlet
from megatron_gcpo.reshard.transport.direct import DirectInlet, DirectOutlet
from megatron_gcpo.reshard.transport.file import FileInlet, FileOutlet
from megatron_gcpo.reshard.transport.gloo import GlooInlet, GlooOutlet
from megatron_gcpo.reshard.transport.ipc import IpcInlet, IpcOutlet
from megatron_gcpo.reshard.transport.nccl import NcclInlet, NcclOutlet
from megatron_gcpo.reshard.transport.shm import ShmInlet, ShmOutlet

ON_DEVICE = frozenset({"direct", "nccl", "ipc"})
"""Transports whose buffers lie on the pusher's device; those of the others are in the memory of the machine."""


def choose(
    *, in_process: bool, alone: bool, shares_memory: bool, gpus: Sequence[str | None], own_gpu: str | None
) -> str:
    """What "auto" stands for.

    in_process: all workers are in the leader's process. alone: no other rank fills the buffers. gpus: of the workers.
    """
    if in_process and (alone or own_gpu is not None):
        return "direct"
    if own_gpu is None:
        return "shm" if shares_memory else "gloo"
    if all(gpu == own_gpu for gpu in gpus):
        return "ipc"
    # NCCL refuses two ranks on one GPU: workers that share the trainer's GPUs, one each, are reached through the host.
    return "shm" if shares_memory and own_gpu in gpus else "nccl"


def make_outlet(
    kind: str,
    bucket_bytes: int,
    workers: Sequence[str],
    *,
    device: torch.device,
    folder: Path,
    loopback: bool,
    timeout_s: float,
) -> Outlet:
    """The pusher's end.

    workers: their names.
    folder: for kind file.
    loopback: all workers are on this machine.
    timeout_s: how long one end waits for the other.
    """
    address = "127.0.0.1" if loopback else _own_address()
    if kind == "direct":
        return DirectOutlet(bucket_bytes, device)
    if kind == "shm":
        return ShmOutlet(bucket_bytes)
    if kind == "gloo":
        return GlooOutlet(bucket_bytes, workers, address, timeout_s)
    if kind == "nccl":
        return NcclOutlet(bucket_bytes, workers, address, _free_port(), device)
    if kind == "ipc":
        return IpcOutlet(bucket_bytes, device)
    assert kind == "file", f"got transport {kind!r}, expected a known one"
    return FileOutlet(bucket_bytes, folder)


def open_inlet(kind: str, info: Mapping[str, Any], worker: str, device: torch.device) -> Inlet:
    """A worker's end, from ``Outlet.init_info()``. Raises ValueError when it cannot reach the pusher's."""
    if kind == "nccl":
        return NcclInlet(info, worker, device)
    if kind == "ipc":
        return IpcInlet(info, worker, device)
    inlets = {"direct": DirectInlet, "shm": ShmInlet, "gloo": GlooInlet, "file": FileInlet}
    if kind not in inlets:
        raise ValueError(f"this engine knows no transport {kind!r}: use the same megatron_gcpo on both sides")
    return inlets[kind](info, worker)


def _own_address() -> str:
    """The address by which other machines reach this one: that of the way out, no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]

"""CUDA IPC: the engine's workers map the leader's buffers on the GPU they share with it.

Written from the sources of torch 2.13 and not run: it needs a GPU.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from megatron_gcpo.reshard.transport.base import NUM_SLOTS, Section


class IpcOutlet:
    shared_path = None

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        self.device = device
        self.slots = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]

    def init_info(self) -> dict[str, Any]:
        """What cudaIpcGetMemHandle says of the buffers, in JSON."""
        return {"slots": [_share(slot) for slot in self.slots], "gpu": _gpu(self.device)}

    def connect(self) -> None:
        pass

    def connected(self) -> None:
        pass

    def message(self, slot: int, sections: Mapping[str, Section]) -> dict[str, Any]:
        """The workers read on streams of their own: what was written must be there."""
        torch.cuda.synchronize(self.device)
        return {"slot": slot, "sections": sections}

    def send(self, slot: int, sections: Mapping[str, Section]) -> None:
        pass

    def close(self) -> None:
        self.slots = []


class IpcInlet:
    def __init__(self, info: Mapping[str, Any], worker: str, device: torch.device) -> None:
        if info["gpu"] != _gpu(device):
            raise ValueError(
                "rollout.push.transport is ipc, but the engine runs on another GPU than the pusher: set it to nccl"
            )
        self.worker, self.device = worker, device
        self.slots = [_map(slot, device) for slot in info["slots"]]

    def receive(self, message: Mapping[str, Any]) -> torch.Tensor:
        offset, num_bytes = message["sections"][self.worker]
        return self.slots[message["slot"]][offset : offset + num_bytes]

    def close(self) -> None:
        self.slots = []


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _share(slot: torch.Tensor) -> list[Any]:
    shared = slot.untyped_storage()._share_cuda_()
    return [base64.b64encode(value).decode() if isinstance(value, bytes) else value for value in shared] + [len(slot)]


def _map(shared: list[Any], device: torch.device) -> torch.Tensor:
    _, handle, size, offset, counter, counter_offset, event, event_needed, length = shared
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        base64.b64decode(handle),
        size,
        offset,
        base64.b64decode(counter),
        counter_offset,
        base64.b64decode(event),
        event_needed,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[:length]

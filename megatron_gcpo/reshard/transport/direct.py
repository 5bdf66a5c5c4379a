"""For an engine in the leader's own process: the worker reads the buffers where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_gcpo.reshard.transport.base import NUM_SLOTS, Section

_OUTLETS: dict[int, DirectOutlet] = {}
"""By id, so that a message of plain numbers finds them."""


class DirectOutlet:
    shared_path = None

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        self.slots = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        _OUTLETS[id(self)] = self

    def init_info(self) -> dict[str, Any]:
        return {"outlet": id(self)}

    def connect(self) -> None:
        pass

    def connected(self) -> None:
        pass

    def message(self, slot: int, sections: Mapping[str, Section]) -> dict[str, Any]:
        return {"slot": slot, "sections": sections}

    def send(self, slot: int, sections: Mapping[str, Section]) -> None:
        pass

    def close(self) -> None:
        _OUTLETS.pop(id(self), None)
        self.slots = []


class DirectInlet:
    def __init__(self, info: Mapping[str, Any], worker: str) -> None:
        outlet = _OUTLETS.get(info["outlet"])
        if outlet is None:
            raise ValueError(
                "rollout.push.transport is direct, but the engine is in another process than the pusher: set it to shm"
            )
        self.outlet, self.worker = outlet, worker

    def receive(self, message: Mapping[str, Any]) -> torch.Tensor:
        offset, num_bytes = message["sections"][self.worker]
        return self.outlet.slots[message["slot"]][offset : offset + num_bytes]

    def close(self) -> None:
        pass

"""NCCL between the leader's GPU and the workers' GPUs, through vLLM's own communicator (which needs no process group).

Written from the sources of vLLM 0.32 and not run: it needs two GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_gcpo.reshard.transport.base import NUM_SLOTS, Section


class NcclOutlet:
    shared_path = None

    def __init__(
        self, bucket_bytes: int, workers: Sequence[str], address: str, port: int, device: torch.device
    ) -> None:
        self.workers = {name: rank for rank, name in enumerate(workers, start=1)}
        self.address, self.port, self.device = address, port, device
        self.slots = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        self.group: Any = None
        self.stream = torch.cuda.Stream(device)

    def init_info(self) -> dict[str, Any]:
        return {"address": self.address, "port": self.port, "ranks": self.workers}

    def connect(self) -> None:
        self.group = _group(self.address, self.port, 0, len(self.workers) + 1, self.device)

    def connected(self) -> None:
        pass

    def message(self, slot: int, sections: Mapping[str, Section]) -> dict[str, Any]:
        return {"sections": sections}

    def send(self, slot: int, sections: Mapping[str, Section]) -> None:
        """On a stream of its own, so that the next bucket is filled meanwhile."""
        self.group.group_start()
        for name, section in sections.items():
            if section.num_bytes:
                data = self.slots[slot][section.offset : section.offset + section.num_bytes]
                self.group.send(data, self.workers[name], stream=self.stream)
        self.group.group_end()
        self.stream.synchronize()

    def close(self) -> None:
        self.group = None
        self.slots = []


class NcclInlet:
    def __init__(self, info: Mapping[str, Any], worker: str, device: torch.device) -> None:
        ranks = info["ranks"]
        self.group = _group(info["address"], info["port"], ranks[worker], len(ranks) + 1, device)
        self.worker, self.device = worker, device
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def receive(self, message: Mapping[str, Any]) -> torch.Tensor:
        _, num_bytes = message["sections"][self.worker]
        if len(self.buffer) < num_bytes:
            self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        section = self.buffer[:num_bytes]
        if num_bytes:
            assert self.group is not None, "got an inlet that was closed"
            self.group.recv(section, 0)
            torch.cuda.current_stream(self.device).synchronize()
        return section

    def close(self) -> None:
        self.group = None


def _group(address: str, port: int, rank: int, size: int, device: torch.device) -> Any:
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    return stateless_init_process_group(address, port, rank, size, device)

"""TCP between machines without accelerators: the pusher is rank 0 of a gloo group, the workers are the others."""

# pyright: reportPrivateImportUsage=false
# torch.distributed documents its stores without listing them as exported.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_gcpo.reshard.transport.base import NUM_SLOTS, Section


class GlooOutlet:
    shared_path = None

    def __init__(self, bucket_bytes: int, workers: Sequence[str], address: str, timeout_s: float) -> None:
        self.workers = {name: rank for rank, name in enumerate(workers, start=1)}
        self.address, self.timeout_s = address, timeout_s
        self.slots = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
        # Port 0: the store takes one that is free, and keeps it.
        self.store = dist.TCPStore(
            address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self.pg: dist.ProcessGroupGloo | None = None

    def init_info(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "port": self.store.port,
            "ranks": self.workers,
            "timeout_s": self.timeout_s,
        }

    def connect(self) -> None:
        self.pg = _group(self.store, 0, len(self.workers) + 1, self.timeout_s)

    def connected(self) -> None:
        pass

    def message(self, slot: int, sections: Mapping[str, Section]) -> dict[str, Any]:
        return {"sections": sections}

    def send(self, slot: int, sections: Mapping[str, Section]) -> None:
        assert self.pg is not None, "got a group that nobody joined, expected connect() before"
        try:
            works = [
                self.pg.send([self.slots[slot][s.offset : s.offset + s.num_bytes]], self.workers[name], 0)  # pyright: ignore[reportAttributeAccessIssue]
                for name, s in sections.items()
                if s.num_bytes
            ]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise ValueError(
                f"a worker of the rollout engine did not take its weights: {_first_line(error)}"
            ) from error

    def close(self) -> None:
        self.pg = None


class GlooInlet:
    def __init__(self, info: Mapping[str, Any], worker: str) -> None:
        timeout = timedelta(seconds=info["timeout_s"])
        ranks = info["ranks"]
        store = dist.TCPStore(info["address"], info["port"], is_master=False, timeout=timeout)
        self.pg: dist.ProcessGroupGloo | None = _group(store, ranks[worker], len(ranks) + 1, info["timeout_s"])
        self.store, self.worker = store, worker
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def receive(self, message: Mapping[str, Any]) -> torch.Tensor:
        assert self.pg is not None, "got a closed inlet"
        _, num_bytes = message["sections"][self.worker]
        if len(self.buffer) < num_bytes:
            self.buffer = torch.empty(num_bytes, dtype=torch.uint8)
        section = self.buffer[:num_bytes]
        if num_bytes:
            try:
                self.pg.recv([section], 0, 0).wait()  # pyright: ignore[reportAttributeAccessIssue]
            except RuntimeError as error:
                raise ValueError(f"the pusher went away in the middle of a push: {_first_line(error)}") from error
        return section

    def close(self) -> None:
        self.pg = None


def _group(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(dist.PrefixStore("push", store), rank, size, timedelta(seconds=timeout_s))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

"""A worker's side of the conversation of a push, whatever holds the weights: who it is, what it is sent, what came."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_gcpo.reshard.receiver import Load, Receiver
from megatron_gcpo.reshard.transport import Inlet, open_inlet
from megatron_gcpo.reshard.transport.place import gpu_id, host_id, process_id
from megatron_gcpo.reshard.wire import Piece, TensorSpec


class Endpoint:
    """Arguments and results are JSON values."""

    def __init__(self, load: Load, device: torch.device) -> None:
        self.name = uuid.uuid4().hex
        self.device = device
        self.push = ""
        """The one under way."""
        self._inlet: Inlet | None = None
        self._connection: str | None = None
        self._specs: list[TensorSpec] = []
        self._buckets: list[list[Piece]] = []
        self._receiver = Receiver(load, device)

    def describe(self) -> dict[str, Any]:
        """A name that changes when the worker is started again, its machine, process and GPU, and who is connected."""
        return {
            "name": self.name,
            "host": host_id(),
            "process": process_id(),
            "gpu": gpu_id(self.device),
            "connection": self._connection,
        }

    def connect(self, connection: str, transport: str, info: Mapping[str, Any]) -> None:
        """Open the inlet to the outlet with this ``init_info``, instead of the one there was.

        Raises ValueError when it cannot be reached.
        """
        self.disconnect()
        self._inlet = open_inlet(transport, info, self.name, self.device)
        self._connection = connection

    def disconnect(self) -> None:
        if self._inlet is not None:
            self._inlet.close()
            self._inlet = self._connection = None

    def remember(self, tensors: Sequence[Any], buckets: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """The plan: ``buckets`` of each worker by its name."""
        self._specs = [TensorSpec.from_json(value) for value in tensors]
        self._buckets = [[Piece.from_json(value) for value in pieces] for pieces in buckets[self.name]]

    def begin(self, push: str, *, whole: bool, verify: bool) -> None:
        self.push = push
        self._receiver.begin(whole=whole, verify=verify)

    @torch.no_grad()
    def take(
        self, push: str, bucket: int, message: Mapping[str, Any], tensors: Sequence[Any], pieces: Sequence[Any]
    ) -> None:
        """One bucket. Without ``tensors`` it holds what the plan says.

        Raises ValueError when it is not the next one of the push under way, or does not come.
        """
        if push != self.push:
            raise ValueError(f"a bucket of push {push} came during push {self.push or 'none'}")
        if bucket != self._receiver.num_buckets:
            raise ValueError(f"bucket {bucket} came, expected {self._receiver.num_buckets}")
        assert self._inlet is not None, "got a bucket before a connection"
        specs, expected = self._specs, self._buckets[bucket] if not tensors else []
        if tensors:
            specs = [TensorSpec.from_json(value) for value in tensors]
            expected = [Piece.from_json(value) for value in pieces]
        self._receiver.receive(specs, expected, self._inlet.receive(message))

    def report(self, push: str) -> dict[str, Any]:
        """``Receiver.report`` with this worker's name. Raises ValueError when another push is under way."""
        if push != self.push:
            raise ValueError(f"push {push} is not the one under way here ({self.push or 'none'})")
        return {"name": self.name, **self._receiver.report()}

    def forget(self) -> None:
        """Let go of what came of a push."""
        self.push = ""
        self._receiver.begin(whole=True, verify=False)

"""The two ends of a transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

NUM_SLOTS = 2
"""Buffers of an outlet: one is filled while the other is delivered."""


class Section(NamedTuple):
    """Part of a buffer, in bytes."""

    offset: int
    num_bytes: int


class Outlet(Protocol):
    """The pusher's end, on the leader."""

    @property
    def slots(self) -> Sequence[torch.Tensor]:
        """NUM_SLOTS buffers, each [bucket_bytes] uint8."""
        ...

    @property
    def shared_path(self) -> str | None:
        """Where other processes of this machine find the buffers, one after the other; None: they cannot."""
        ...

    def init_info(self) -> dict[str, Any]:
        """JSON values from which a worker opens its inlet."""
        ...

    def connect(self) -> None:
        """Meet the workers, while they open their inlets."""
        ...

    def connected(self) -> None:
        """Everybody who shares the buffers has opened them."""
        ...

    def message(self, slot: int, sections: Mapping[str, Section]) -> dict[str, Any]:
        """JSON values that tell the workers, by their names, where their section of this bucket is."""
        ...

    def send(self, slot: int, sections: Mapping[str, Section]) -> None:
        """Move the sections, while the workers receive. Raises ValueError when one does not take it in time."""
        ...

    def close(self) -> None: ...


class Inlet(Protocol):
    """A worker's end."""

    def receive(self, message: Mapping[str, Any]) -> torch.Tensor:
        """This worker's section, uint8, on its device, valid until the next call. Raises ValueError on a timeout."""
        ...

    def close(self) -> None: ...

"""What a push moved and how long it took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class PushStats:
    """One push, as seen by this rank."""

    mode: str
    """sharded; full; direct: copied into an engine that keeps its weights in the leader itself; adapters: those alone."""
    transport: str
    num_tensors: int
    num_bytes: int
    """That reached the engine's workers, all together."""
    minimal_bytes: int | None
    """What the parameters of all workers take of it; None: unknown."""
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by what this rank did."""

    def metrics(self) -> dict[str, float]:
        ratio = {} if not self.minimal_bytes else {"bytes_over_minimum": self.num_bytes / self.minimal_bytes}
        phases = {f"{name.replace(' ', '_')}_s": seconds for name, seconds in self.phases.items()}
        return {"bytes": float(self.num_bytes), "seconds": self.seconds, **ratio, **phases}


@dataclass(kw_only=True)
class Phases:
    """Adds up seconds by name: ``with phases("fill"): ...``."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start_s

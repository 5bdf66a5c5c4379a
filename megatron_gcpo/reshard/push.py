"""Hand the policy's weights to the rollout engine of a replica.

The seam is an iterator of (Hugging Face name, full tensor). Producing it is collective over the replica's ranks, so all
of them must walk it to its end, whatever happens to the engine; only the rank that holds the engine keeps what it sees,
one tensor at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from megatron_gcpo.reshard.stats import PushStats
from megatron_gcpo.rollout.engine import RolloutEngine

Load = Callable[[RolloutEngine, Iterable[tuple[str, torch.Tensor]], int | None], None]
"""Gives an engine all of these tensors as this version, or raises ValueError and leaves it unfit."""


def push(
    export: Iterable[tuple[str, torch.Tensor]],
    engine: RolloutEngine | None,
    *,
    version: int | None = None,
    load: Load | None = None,
    mode: str = "full",
) -> PushStats:
    """Walk a collective export; the rank that holds the engine loads it and advances the engine's policy version.

    Args:
        export: (Hugging Face name, full tensor), in the same order on every rank of the replica.
        engine: on the replica's leader; None on its peers, which only take part in the collectives.
        version: the policy version to serve as; None: one more than before.
        load: what gives the engine the tensors; None: its ``load_weights``.
        mode: that of the PushStats.

    Raises:
        ValueError: the engine did not get a complete set of weights; it refuses to serve. Raised on the leader after it
            has walked the export to its end, so that its peers are not left waiting inside a collective.
    """
    start_s = time.monotonic()
    counts = [0, 0]

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in export:
            counts[0] += 1
            counts[1] += tensor.numel() * tensor.element_size()
            yield name, tensor

    tensors = counted()
    num_workers = 1
    try:
        if engine is not None:
            if load is None:
                engine.load_weights(tensors, version=version)
            else:
                load(engine, tensors, version)
            num_workers = 1 if engine.control is None else engine.control.num_workers
    except ValueError as error:
        raise ValueError(
            f"pushing weights to the rollout engine failed: {error}. The engine serves nothing until a complete push; "
            "check that model.path or model.hf_config describes the model that is trained"
        ) from error
    finally:
        for _ in tensors:
            pass
    return PushStats(
        mode=mode,
        transport="direct",
        num_tensors=counts[0],
        num_bytes=counts[1] * num_workers,
        minimal_bytes=None,
        seconds=time.monotonic() - start_s,
    )


@contextlib.contextmanager
def refusing(engine: RolloutEngine | None, what: str) -> Iterator[None]:
    """What cannot be pushed ends the engine's service, and the error says so; ``what`` was to be pushed."""
    try:
        yield
    except ValueError as error:
        if engine is not None:
            engine.refuse(f"the last push failed: {error}")
        raise ValueError(
            f"pushing {what} to the rollout engine failed: {error}. The engine serves nothing until a complete push"
        ) from error

"""The starting policy, kept to measure how far training has moved from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_gcpo.policy.actor import Actor
from megatron_gcpo.types import TokenBatch, TokenStats


class Reference:
    """A frozen copy of an actor's weights as they are now, in host memory, that borrows the actor's model to run.

    One more copy of this rank's shard, and two copies over the bus for each pass.
    """

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._frozen = [p.detach().to("cpu", copy=True) for p in self._parameters()]

    def logprobs(self, batch: TokenBatch) -> TokenStats:
        """Statistics of every token under the starting policy; collective like Actor.logprobs."""
        with self._lent():
            return self._actor.logprobs(batch)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self._actor.policy.chunks for p in chunk.module.parameters()]

    @contextmanager
    def _lent(self) -> Iterator[None]:
        # Only the storage that a parameter points to is exchanged: Megatron's flat buffers keep the trained weights.
        self._actor.gather_parameters()
        parameters = self._parameters()
        trained = [p.data for p in parameters]
        try:
            for p, frozen in zip(parameters, self._frozen, strict=True):
                p.data = frozen.to(p.device)
            yield
        finally:
            for p, data in zip(parameters, trained, strict=True):
                p.data = data

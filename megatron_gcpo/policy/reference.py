"""The starting policy, kept to measure how far training has moved from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_gcpo.policy.actor import Actor
from megatron_gcpo.policy.lora import adapters_off
from megatron_gcpo.types import TokenBatch, TokenStats


class Reference:
    """A frozen copy of an actor's weights as they are now, in host memory, that borrows the actor's model to run.

    One more copy of this rank's shard, and two copies over the bus for each pass. An actor that trains adapters needs none:
    its reference is the model without them.
    """

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        adapted = actor.policy.adapters is not None
        self._frozen = None if adapted else [p.detach().to("cpu", copy=True) for p in self._parameters()]

    def logprobs(self, batch: TokenBatch) -> TokenStats:
        """Statistics of every token under the starting policy; collective like Actor.logprobs."""
        if self._frozen is None:
            with adapters_off(self._actor.policy):
                return self._actor.logprobs(batch)
        with self._lent(self._frozen):
            return self._actor.logprobs(batch)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for chunk in self._actor.policy.chunks for p in chunk.module.parameters()]

    @contextmanager
    def _lent(self, weights: list[torch.Tensor]) -> Iterator[None]:
        # Only the storage that a parameter points to is exchanged: Megatron's flat buffers keep the trained weights.
        self._actor.gather_parameters()
        parameters = self._parameters()
        trained = [p.data for p in parameters]
        try:
            for p, frozen in zip(parameters, weights, strict=True):
                p.data = frozen.to(p.device)
            yield
        finally:
            for p, data in zip(parameters, trained, strict=True):
                p.data = data

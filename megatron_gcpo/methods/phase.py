"""What the parts of phase one have in common (methods.prepare): what they see, and what they give back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_gcpo.types import TokenBatch, TokenStats

type State = Mapping[str, float]
"""What a part remembers from step to step; saved with every checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Where in the run a step stands, and how its replica adds numbers to those of the others."""

    step: int
    """0-based."""
    total_steps: int
    sum: Callable[[torch.Tensor], torch.Tensor]
    """[K] float64 or int64 of this replica -> the sum over all replicas. Collective: all call it equally often."""

    @property
    def progress(self) -> float:
        """0 at the first step of the run, 1 at its last."""
        return self.step / max(self.total_steps - 1, 1)

    def mean(self, values_T: torch.Tensor, mask_T: torch.Tensor) -> tuple[float, float]:
        """(mean, population std) of the trained tokens of all replicas, 0 and 0 where there are none. Collective."""
        masked_T = torch.where(mask_T > 0, values_T, 0).double()
        count, total = self.sum(torch.stack([mask_T.double().sum(), masked_T.sum()])).tolist()
        mean = total / max(count, 1)
        centred_T = torch.where(mask_T > 0, values_T.double() - mean, 0)
        (squares,) = self.sum(centred_T.square().sum()[None]).tolist()
        return mean, (squares / max(count, 1)) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch with constants that one part has added, and what that part remembers."""

    batch: TokenBatch
    state: State = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


type Prepare = Callable[[TokenBatch, TokenStats, Any, State, Scope], Prepared]
"""(replica's batch, statistics of the policy that is about to be updated, options, own state, scope) -> Prepared.

Runs once a step, without gradient, alike on every rank of a replica. ``batch`` holds whole groups, and the statistics are on
the batch's token axis. What couples tokens beyond the replica goes through ``scope.sum``, so that no layout can change it.
"""


def alone(step: int = 0, total_steps: int = 1) -> Scope:
    """The scope of a single replica."""
    return Scope(step=step, total_steps=total_steps, sum=lambda values: values)

"""What a part of the chain is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from megatron_gcpo.methods.phase import Prepare, Prepared, State
from megatron_gcpo.types import TokenBatch


@dataclass(frozen=True, kw_only=True)
class TokenCredit:
    """One row of the TOKEN_CREDITS table."""

    apply: Prepare
    """Changes ``advantages_T`` (or the constants beside it), nothing else."""
    second_moments: bool = False
    """Whether it reads sum p^2 and sum p^2 log p of the statistics."""
    updates: str = "any"
    """"one": exact only for one optimizer update a step; "many": has no effect on the first update; "any"."""
    why: str = ""
    """Why not the other numbers of updates, for the message."""


def reweighed(
    batch: TokenBatch, weights_T: torch.Tensor, metrics: Mapping[str, float], state: State | None = None
) -> Prepared:
    """The batch with its advantages multiplied, [T] weights of any floating dtype."""
    advantages_T = (batch.advantages_T.double() * weights_T * batch.mask_T).float()
    return Prepared(batch=replace(batch, advantages_T=advantages_T), state=state or {}, metrics=metrics)

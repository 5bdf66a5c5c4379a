"""Megatron's checkpoints of torch's Adam, which stands in where the fused ones of Transformer Engine and Apex are missing.

Megatron-Core 0.19.2 keeps one step count per parameter group, torch one tensor per parameter, and the two disagree in
three places that are mended here. With a fused Adam nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def fill(optimizer: Any) -> None:
    """Make the state that the first step would make: Megatron neither saves nor loads an Adam that has none yet."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                part.optimizer.state[p] = {
                    "step": torch.zeros((), device=p.device if group["capturable"] else "cpu"),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }


def load(optimizer: Any, state: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict(state)``, with a step count of its own for every parameter."""
    distributed = [part for part in _parts(optimizer) if isinstance(part, DistributedOptimizer)]
    for part in distributed:
        _leave_step_alone(part)
    try:
        optimizer.load_state_dict(state)
    finally:
        for part in distributed:
            del part._set_main_param_and_optimizer_states
    for part in _parts(optimizer):
        # All parameters share one tensor now, which would count a step once for each of them.
        for values in part.optimizer.state.values():
            values["step"] = values["step"].clone()


def _parts(optimizer: Any) -> Iterator[Any]:
    """The Megatron optimizers that wrap a torch Adam."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam):
            yield part


def _leave_step_alone(part: Any) -> None:
    """It copies every tensor of a parameter's state from the checkpoint, also the step, which is not there."""
    put = part._set_main_param_and_optimizer_states
    part._set_main_param_and_optimizer_states = lambda param, tensors: put(param, {**tensors, "step": None})

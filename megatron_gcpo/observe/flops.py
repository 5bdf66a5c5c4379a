"""What the training part of a step computes, and the share of the hardware that it reached."""

from __future__ import annotations

from typing import Any

import torch

from megatron_gcpo.plan.duration import forward_flops_per_token
from megatron_gcpo.plan.hardware import GPUS
from megatron_gcpo.plan.shape import read_shape


def utilization(provider: Any, num_tokens: int, num_rows: int, seconds: float, num_ranks: int) -> dict[str, float]:
    """perf/train_tflops_per_rank, and on a GPU that the planner knows perf/mfu (of its dense bf16 peak).

    Model FLOP: three forward passes' worth for each token, two per weight and attention over half of its sequence;
    recomputation and padding are no work of the model and do not count (PaLM, arXiv 2204.02311, appendix B). Nothing where
    no token was trained.

    Args:
        num_tokens, num_rows: of all replicas; every sequence counts at its mean length.
        seconds: of all updates of the step.
    """
    if not num_tokens or seconds <= 0:
        return {}
    shape = read_shape(provider)
    dense, expert = forward_flops_per_token(shape, num_tokens / num_rows / 2)
    achieved = 3 * (dense + expert) * num_tokens / seconds / num_ranks
    found = {"perf/train_tflops_per_rank": achieved / 1e12}
    peak = _peak_flops()
    return found if peak is None else {**found, "perf/mfu": achieved / peak}


def _peak_flops() -> float | None:
    """Of this process's GPU; None without one, or for a kind that plan.hardware does not list."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name().lower()
    return next((gpu.flops for kind, gpu in GPUS.items() if kind in name), None)

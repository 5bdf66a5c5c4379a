"""Traces of chosen steps: torch's profiler on every rank, and on CUDA a snapshot of the memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MEMORY_EVENTS = 1_000_000


@contextlib.contextmanager
def profiled(folder: Path, step: int, rank: int, *, wanted: bool) -> Iterator[None]:
    """Run the block under the profiler and write ``step_N_rank_R.json`` (Chrome's trace format) into ``folder``.

    On CUDA also ``step_N_rank_R.memory.pickle``, for https://pytorch.org/memory_viz.
    """
    if not wanted:
        yield
        return
    on_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}_rank_{rank:03d}"
    if on_cuda:
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    try:
        with profile(activities=activities, record_shapes=True, profile_memory=True) as recorded:
            yield
        recorded.export_chrome_trace(f"{path}.json")
    finally:
        if on_cuda:
            torch.cuda.memory._dump_snapshot(f"{path}.memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)

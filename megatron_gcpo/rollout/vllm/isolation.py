"""vLLM started inside a trainer's process must leave the trainer's process groups, random numbers and console alone."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import random
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed.distributed_c10d as c10d

NAMES_APART = 1 << 20
"""torch names process groups by a running number, which must neither repeat nor differ among the ranks of a trainer."""
_STARTS = itertools.count(1)


@contextlib.contextmanager
def own_process_groups() -> Iterator[None]:
    """A time in which ``torch.distributed`` is not initialised yet, whatever the process has set up before.

    vLLM takes an initialised default group for its own and makes further groups of all its ranks, which would wait
    forever for trainer ranks that host no engine. The groups it makes here stay valid afterwards, beside the trainer's.
    For the same reason it must end in such a time.
    """
    module: Any = c10d
    group_count = module._world.group_count
    with mock.patch.object(module, "_world", module._World()):
        module._world.group_count = group_count + NAMES_APART * next(_STARTS)
        try:
            yield
        finally:
            module._world.group_count = group_count


@contextlib.contextmanager
def kept_globals() -> Iterator[None]:
    """Random states, the default dtype and ``torch.set_num_threads`` are afterwards what they were before."""
    python, numpy_state = random.getstate(), np.random.get_state()
    dtype, set_num_threads = torch.get_default_dtype(), torch.set_num_threads
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_default_dtype(dtype)
        torch.set_num_threads = set_num_threads


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Nothing is written to stderr by this process, C++ code included, unless what runs inside fails."""
    sys.stderr.flush()
    console = os.dup(2)
    try:
        with tempfile.TemporaryFile() as heard, warnings.catch_warnings(action="ignore"):
            os.dup2(heard.fileno(), 2)
            try:
                yield
            except BaseException:
                heard.seek(0)
                os.write(console, heard.read())
                raise
            finally:
                sys.stderr.flush()
                os.dup2(console, 2)
    finally:
        os.close(console)


def leave_uncompiled() -> None:
    """On a CPU vLLM compiles the counting of ranks of sampled tokens at the first request, for 15 s; nobody reads them."""
    for name in ("vllm.v1.sample.ops.logprobs", "vllm.v1.sample.sampler"):
        module = vars(importlib.import_module(name))
        count = module["batched_count_greater_than"]
        module["batched_count_greater_than"] = getattr(count, "_torchdynamo_orig_callable", count)


def draw_apart() -> None:
    """On a CPU vLLM's sampler takes numbers from torch's global generator, also for rows that have their own.

    Those would be missing from the trainer's random numbers on this rank and not on its peers.
    """
    module = vars(importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler"))
    if module["torch"] is torch:
        module["torch"] = _TorchWithOwnGenerator("torch")


class _TorchWithOwnGenerator(types.ModuleType):
    """``torch``, except that ``randint`` leaves the global generator alone."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._generator = torch.Generator()

    def randint(self, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> torch.Tensor:
        return torch.randint(*args, generator=generator or self._generator, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

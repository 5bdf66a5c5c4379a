"""What vLLM reads from the environment: the one place that sets it, before vLLM is imported."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

UNSET = ("VLLM_CPU_KVCACHE_SPACE",)
"""Would overrule the ``kv_cache_memory_bytes`` that an engine is given, in whole GiB."""


def environment(*, cpu: bool, threads: int = 1, quiet: bool = True) -> dict[str, str]:
    """Settings of a process that runs vLLM, on a machine without or with CUDA.

    Args:
        threads: OMP threads of each worker on a CPU.
        quiet: only errors are logged; else what vLLM logs by default.
    """
    common = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR" if quiet else "INFO",
        # workers must not be forked from a process that has threads, process groups and perhaps a CUDA context
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # both builds then draw, score and keep requests by the same code; it is the only one without Triton
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if not cpu:
        return common
    return common | {
        # more threads than cores make a decode step tens of times slower, and idle ones must not spin
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def child_environment(base: Mapping[str, str], *, cpu: bool, threads: int = 1, quiet: bool = False) -> dict[str, str]:
    """The whole environment of a process that runs nothing but vLLM, derived from ``base``."""
    kept = {name: value for name, value in base.items() if name not in UNSET}
    settings = environment(cpu=cpu, threads=threads, quiet=quiet)
    # a CPU compiles the ranks of sampled tokens for 15 s at the first request, and nobody reads them
    return kept | settings | ({"TORCH_COMPILE_DISABLE": "1"} if cpu else {})


def prepare_process(*, cpu: bool, threads: int = 1) -> None:
    """Set up this process and its children for engines made in it; call before the first import of vLLM."""
    for name in UNSET:
        os.environ.pop(name, None)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it speaks while it is imported, before it reads its settings
    # the scheduler stays in this process, also when workers run beside it: steps are ours to hold back
    os.environ.update(environment(cpu=cpu, threads=threads) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})

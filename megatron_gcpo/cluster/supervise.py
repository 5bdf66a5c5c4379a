"""The parent of a local launch: starts one process per rank, and sees to it that none outlives the others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gcpo.cluster import failure

POLL_S = 0.05
GRACE_S = 10.0
"""Time from the polite signal to SIGKILL."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded here: as little as possible is done between fork and exec."""


@dataclass(frozen=True, kw_only=True)
class RankCommand:
    rank: int
    argv: Sequence[str]
    env: Mapping[str, str]
    inherited_fds: Sequence[int] = ()


def supervise(commands: Sequence[RankCommand], log_dir: Path) -> int:
    """Run the commands until all have ended, or one has failed, or we are told to stop; returns the exit code.

    Rank 0 writes to our console, the others to ``log_dir/rank<n>.log``. A failure ends all ranks and prints one line.
    Exit codes: 0, 1 after a failure, 128 + the signal that stopped us.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    failure.clear(log_dir, len(commands))
    with noted_signals() as received:
        processes: dict[int, subprocess.Popen[Any]] = {}
        try:
            for command in commands:
                processes[command.rank] = _start(command, log_dir)
            failed = _watch(processes, received)
        finally:
            _end(processes, received[0] if received else signal.SIGTERM)
    if received and not failed:
        print(f"stopped by {received[0].name}; all {len(processes)} ranks have ended", file=sys.stderr, flush=True)
        return 128 + received[0]
    if failed:
        rank, why = failure.first_failure(log_dir, failed)
        print(f"error: rank {rank}: {why} (log: {failure.log_path(log_dir, rank)})", file=sys.stderr, flush=True)
        return 1
    return 0


def _start(command: RankCommand, log_dir: Path) -> subprocess.Popen[Any]:
    # A session of its own keeps the terminal's Ctrl-C away from the ranks (we pass it on once), and makes the rank and
    # whatever it starts one group that can be killed together.
    options: dict[str, Any] = {
        "env": dict(command.env),
        "stdin": subprocess.DEVNULL,
        "pass_fds": tuple(command.inherited_fds),
        "start_new_session": True,
    }
    if command.rank == 0:
        return subprocess.Popen(command.argv, **options)
    with failure.log_path(log_dir, command.rank).open("ab") as log:
        return subprocess.Popen(command.argv, stdout=log, stderr=subprocess.STDOUT, **options)


def _watch(processes: Mapping[int, subprocess.Popen[Any]], received: Sequence[signal.Signals]) -> dict[int, int]:
    """Wait for the end; returns the exit codes of ranks that failed by themselves."""
    while not received:
        codes = {rank: process.poll() for rank, process in processes.items()}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed or all(code == 0 for code in codes.values()):
            return failed
        time.sleep(POLL_S)
    return {}


def _end(processes: Mapping[int, subprocess.Popen[Any]], first: signal.Signals) -> None:
    """Ask the ranks, wait, kill: the ranks and what they left running behind them, whether they ended well or not."""
    deadline = time.monotonic() + GRACE_S
    for process in processes.values():
        if process.poll() is None:
            process.send_signal(first)
    while time.monotonic() < deadline and any(process.poll() is None for process in processes.values()):
        time.sleep(POLL_S)
    for process in processes.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def noted_signals() -> Iterator[list[signal.Signals]]:
    """Ctrl-C and SIGTERM are noted instead of raised, so that no rank is forgotten half-way through a start."""
    received: list[signal.Signals] = []
    watched = (signal.SIGINT, signal.SIGTERM)
    before = {which: signal.getsignal(which) for which in watched}
    for which in watched:
        signal.signal(which, lambda number, frame: received.append(signal.Signals(number)))
    try:
        yield received
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


def end_with_parent() -> None:
    """In a child, before exec: SIGTERM when we die in whatever way, so that it does not outlive us (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

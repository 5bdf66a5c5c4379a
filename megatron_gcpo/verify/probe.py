"""What confinement really achieves here: a confined process tries to get out and reports what it could not do."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

GUARANTEES: dict[str, str] = {
    "no_network": "open a network connection",
    "no_processes": "start processes",
    "no_writes": "create, write or remove files",
    "no_signals": "signal other processes",
    "no_parent": "read the trainer's environment and memory",
    "no_files": "read files outside Python's folders",
}
"""Name -> what model output then cannot make a worker do."""
REQUIRED: dict[str, frozenset[str]] = {
    "best_effort": frozenset(),
    "standard": frozenset({"no_network", "no_processes", "no_writes", "no_signals"}),
    "strict": frozenset(GUARANTEES),
}
"""verify.isolation -> the guarantees without which the pool refuses to start."""
_REMEDY = (
    "run on Linux 5.13 or newer with seccomp and Landlock, allow unprivileged user namespaces, or start the job as "
    "root; or lower verify.isolation"
)


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """What holds in every worker of a pool."""

    measures: tuple[str, ...]
    """Kernel mechanisms in force: rlimits, seccomp, landlock, uid, userns, netns."""
    guarantees: tuple[str, ...]
    """Keys of GUARANTEES that were tried out at the start and hold."""
    notes: tuple[str, ...] = ()
    """Oddities of this machine a person should know."""

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in GUARANTEES if name not in self.guarantees)

    def check(self, level: str) -> None:
        """Raises ValueError when ``level`` (a key of REQUIRED) asks for more than holds."""
        lacking = [GUARANTEES[name] for name in self.missing if name in REQUIRED[level]]
        if lacking:
            raise ValueError(
                f"verify.isolation={level}: on this machine model output could make a verifier {'; '.join(lacking)}. "
                f"To fix it, {_REMEDY}"
            )


def attempt_escape(trainer_pid: int) -> list[str]:
    """Names of the guarantees that hold for this process. Call it confined; harmless if it is not."""
    attempts: dict[str, Callable[[int], None]] = {
        "no_network": _network,
        "no_processes": _process,
        "no_writes": _write,
        "no_signals": _signal,
        "no_parent": _parent,
        "no_files": _files,
    }
    assert attempts.keys() == GUARANTEES.keys(), f"got {attempts.keys()}, expected {GUARANTEES.keys()}"
    held = []
    for name, attempt in attempts.items():
        try:
            attempt(trainer_pid)
        except OSError:
            held.append(name)
    return held


def _network(_: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        # Connecting a datagram socket sends nothing, and fails in an own network namespace, whose loopback is down.
        s.connect(("127.0.0.1", 9))


def _process(_: int) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _write(_: int) -> None:
    with _temporary_name() as name:
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600))


@contextlib.contextmanager
def _temporary_name() -> Iterator[str]:
    name = f"/tmp/verify-probe-{os.getpid()}"
    yield name
    os.unlink(name)


def _signal(trainer_pid: int) -> None:
    # Signal 0 delivers nothing and needs the same permission.
    os.kill(trainer_pid, 0)
    os.kill(os.getppid(), signal.SIG_DFL)


def _parent(trainer_pid: int) -> None:
    Path(f"/proc/{trainer_pid}/environ").read_bytes()


def _files(_: int) -> None:
    os.listdir("/etc")

"""Confinement of the processes that look at model output, with what the Linux kernel at hand lets this user do.

Two steps. ``isolate`` is called once by a worker, early, while it has a single thread: own network and IPC namespaces.
``Confinement.enter`` is called by each judge, a fork of the worker, just before it sees model output; nothing it gives
up can be had back. Every measure is tried and none is trusted: ``probe`` finds out what really holds.

    measure     root                        other users               needs
    seccomp     yes                         yes                       a kernel with seccomp, x86-64 or arm64
    uid         an unused uid, no groups    -                         CAP_SETUID and that uid mapped
    userns      -                           yes                       unprivileged user namespaces allowed
    netns       yes                         with userns               root: CAP_SYS_ADMIN
    landlock    yes                         yes                       Linux 5.13, Landlock enabled
    rlimits     yes                         yes

What follows for model output (``Isolation.guarantees`` says what was found to hold, ``verify.isolation`` what must):

    seccomp         no network, no new processes or threads, no file written or removed, no signals: the standard level,
                    for every user, in containers too. Without it landlock, netns and rlimits give the same save signals.
    uid or userns   the trainer's environment and memory cannot be read.
    landlock        nor can any file outside Python's folders: the strict level. Without it judges can read what everybody
                    may (uid) or what the trainer's user may (no uid), but have nowhere to send it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from megatron_gcpo.verify import landlock, seccomp

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITY_VERSION_3 = 0x20080522
_FIRST_UID, _NUM_UIDS, _NOBODY = 61184, 4096, 65534
"""Range that systemd sets aside for throw-away users: no file system has files of theirs."""
_STACK_BYTES, _MAX_OPEN_FILES = 8 << 20, 64
_SHARED = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo"),
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
)
"""Readable besides Python's own folders: shared libraries, time zones, harmless devices."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one judge may use."""

    memory_bytes: int
    """Address space above what the worker holds when idle."""
    cpu_s: int | None
    """CPU seconds over the judge's whole life; None for a judge that lives on."""


def isolate() -> list[str]:
    """Own network and IPC namespaces for this process and its children; returns the measures that worked."""
    attempts = [(os.CLONE_NEWUSER | os.CLONE_NEWNET | os.CLONE_NEWIPC, ["userns", "netns"])]
    if _can_change_user():
        # Never a user namespace here: without a mapping in it, the judges could not become another user.
        attempts = [(os.CLONE_NEWNET | os.CLONE_NEWIPC, ["netns"])]
    else:
        attempts.append((os.CLONE_NEWUSER, ["userns"]))
    for flags, measures in attempts:
        try:
            os.unshare(flags)
        except OSError:
            continue
        return measures
    return []


def enter_empty_folder() -> None:
    """Make the working directory a folder that is empty and stays so: it is removed at once, and dies with us."""
    folder = tempfile.mkdtemp(prefix="verify-")
    os.chdir(folder)
    os.rmdir(folder)


def offer_to_the_oom_killer() -> None:
    """When the machine runs out of memory the kernel shall take us and our children, not the trainer."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, which forked it, dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def hide_memory() -> None:
    """Keep other processes of the same user out of this one's /proc entries."""
    _prctl(_PR_SET_DUMPABLE, 0)


def vm_bytes() -> int:
    """Address space this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """All that can be made ready before a judge is forked: uid, filter program, file rules."""

    limits: Limits
    filter_program: bytes | None
    file_rules: int | None
    """Descriptor of the Landlock rules."""
    uid: int | None
    """What to become; None: stay the user."""
    idle_bytes: int = field(default_factory=vm_bytes)

    @classmethod
    def plan(cls, limits: Limits, readable: tuple[str, ...] = ()) -> Confinement:
        """``readable``: files and folders besides Python's own that judges may read."""
        return cls(
            limits=limits,
            filter_program=seccomp.program(),
            file_rules=landlock.ruleset((*readable, *_python_folders(), *_SHARED)),
            uid=_FIRST_UID + os.getpid() % _NUM_UIDS if _can_change_user() else None,
        )

    def enter(self) -> list[str]:
        """Confine this (single-threaded) process for good; returns the measures that worked."""
        worker, measures = os.getppid(), ["rlimits"]
        if self.uid is not None and _become(self.uid):
            measures.append("uid")
        _drop_capabilities()
        # After the change of user, which clears it.
        die_with(worker)
        hide_memory()
        self._limit()
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        if self.file_rules is not None and landlock.restrict(self.file_rules):
            measures.append("landlock")
        if self.file_rules is not None:
            os.close(self.file_rules)
        if self.filter_program is not None and seccomp.install(self.filter_program):
            measures.append("seccomp")
        return measures

    def _limit(self) -> None:
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_NPROC: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
            resource.RLIMIT_STACK: _STACK_BYTES,
            resource.RLIMIT_AS: self.idle_bytes + self.limits.memory_bytes,
        }
        for which, value in limits.items():
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))
        if self.limits.cpu_s is not None:
            # A second apart: at the soft limit SIGXCPU tells why, at the hard limit SIGKILL makes sure.
            resource.setrlimit(resource.RLIMIT_CPU, (self.limits.cpu_s, self.limits.cpu_s + 1))


def _prctl(option: int, value: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    return libc.prctl(option, value, 0, 0, 0) == 0


def _can_change_user() -> bool:
    """Whether we are root in a namespace that has an unused user to become."""
    if os.geteuid() != 0:
        return False
    mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return mapped > _NOBODY and Path("/proc/self/setgroups").read_text().strip() == "allow"


def _become(uid: int) -> bool:
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:
        return False
    return True


def _drop_capabilities() -> None:
    """Give up what a new user namespace gave (as root, the change of user has done it)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24)))


def _python_folders() -> list[str]:
    """Where modules and their data files are loaded from."""
    package = str(Path(__file__).resolve().parents[1])
    # The folder that holds our package may be a whole working tree: only the package itself is opened.
    folders = [path for path in sys.path if path and Path(package).parent != Path(path).resolve()]
    return [package, *folders, str(Path(sys.base_prefix) / "lib")]

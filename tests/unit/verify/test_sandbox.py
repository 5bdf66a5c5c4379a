"""Each measure by itself, as root and as an ordinary user, judged by what a confined process then fails to do."""

from __future__ import annotations

import errno
import json
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gcpo.verify import seccomp
from megatron_gcpo.verify.probe import GUARANTEES, REQUIRED, Isolation

ROOT = Path(__file__).resolve().parents[3]

# Runs one confined fork per case. argv: package root, uid to become first (or "keep"), namespaces or not.
SCRIPT = """
import ctypes, dataclasses, json, os, sys
sys.path.insert(0, sys.argv[1])
from megatron_gcpo.verify import sandbox
from megatron_gcpo.verify.probe import attempt_escape
if sys.argv[2] != "keep":
    os.setgroups([]); os.setresgid(*[int(sys.argv[2])] * 3); os.setresuid(*[int(sys.argv[2])] * 3)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # dumpable again, as a process is that never changed its user
trainer = os.getpid()
report = {}
keeper = os.fork()
if keeper:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1]))
measures = sandbox.isolate() if sys.argv[3] == "namespaces" else []
plan = sandbox.Confinement.plan(sandbox.Limits(memory_bytes=1 << 28, cpu_s=60))
cases = {
    "all": plan,
    "no seccomp": dataclasses.replace(plan, filter_program=None),
    "no landlock": dataclasses.replace(plan, file_rules=None),
    "seccomp alone": dataclasses.replace(plan, file_rules=None, uid=None),
}
for name, confinement in cases.items():
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        got = confinement.enter()
        os.write(writing, json.dumps([sorted(measures + got), attempt_escape(trainer)]).encode())
        os._exit(0)
    os.close(writing)
    report[name] = json.loads(os.read(reading, 4096))
    os.waitpid(child, 0)
print(json.dumps(report))
"""


def confined(user: str, namespaces: bool) -> dict[str, tuple[set[str], set[str]]]:
    """Per case: measures that worked, guarantees that held."""
    arguments = [sys.executable, "-c", SCRIPT, str(ROOT), user, "namespaces" if namespaces else "none"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return {case: (set(measures), set(held)) for case, (measures, held) in json.loads(done.stdout).items()}


ORDINARY = "61000" if os.geteuid() == 0 else "keep"
HAS_FILTER = {"no_network", "no_processes", "no_writes", "no_signals"}


@pytest.fixture(scope="module")
def ordinary() -> dict[str, tuple[set[str], set[str]]]:
    return confined(ORDINARY, namespaces=True)


@pytest.fixture(scope="module")
def ordinary_without_namespaces() -> dict[str, tuple[set[str], set[str]]]:
    return confined(ORDINARY, namespaces=False)


def test_an_ordinary_user_gets_everything_this_kernel_has(ordinary: dict) -> None:
    measures, held = ordinary["all"]
    assert {"rlimits", "seccomp"} <= measures
    assert "uid" not in measures
    assert held >= HAS_FILTER
    if "landlock" in measures:
        assert held == set(GUARANTEES)


def test_the_filter_alone_gives_the_standard_guarantees(ordinary_without_namespaces: dict) -> None:
    """Where containers forbid namespaces and the kernel is too old for Landlock, only reading is left open."""
    measures, held = ordinary_without_namespaces["seccomp alone"]
    assert measures == {"rlimits", "seccomp"}
    assert held == HAS_FILTER


def test_a_user_namespace_hides_the_trainer(ordinary: dict, ordinary_without_namespaces: dict) -> None:
    measures, held = ordinary["no landlock"]
    assert ("no_parent" in held) == ("userns" in measures)
    assert "no_parent" not in ordinary_without_namespaces["no landlock"][1]


def test_without_the_filter_the_other_measures_still_hold_most(ordinary: dict) -> None:
    measures, held = ordinary["no seccomp"]
    assert "seccomp" not in measures
    assert "no_processes" in held  # RLIMIT_NPROC
    if "netns" in measures:
        assert "no_network" in held
    if "landlock" in measures:
        assert {"no_writes", "no_parent", "no_files"} <= held


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give it up")
def test_root_becomes_nobody_in_particular() -> None:
    report = confined("keep", namespaces=True)
    for case in ("all", "no seccomp", "no landlock"):
        assert "uid" in report[case][0]
        assert "userns" not in report[case][0]
        assert "no_parent" in report[case][1]
    assert report["all"][1] >= HAS_FILTER | {"no_parent"}


def test_a_level_that_does_not_hold_says_what_is_possible_and_what_to_do() -> None:
    weak = Isolation(measures=("rlimits",), guarantees=("no_network", "no_processes", "no_writes", "no_signals"))
    weak.check("best_effort")
    weak.check("standard")
    with pytest.raises(ValueError, match=r"verify\.isolation=strict.*read the trainer's environment.*lower verify"):
        weak.check("strict")
    bare = Isolation(measures=(), guarantees=())
    with pytest.raises(ValueError, match="open a network connection; start processes"):
        bare.check("standard")
    bare.check("best_effort")
    assert bare.missing == tuple(GUARANTEES)
    assert REQUIRED["strict"] == set(GUARANTEES)


def run_filter(program: bytes, arch: int, number: int, arguments: tuple[int, ...]) -> int:
    """A classic-BPF machine with the five instructions the filter uses: the kernel's verdict on one call."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *(*arguments, *[0] * 6)[:6])
    ops = list(struct.iter_unpack("HBBI", program))
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, k = ops[at]
        at += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, k)
            case 0x54:
                accumulator &= k
            case 0x15:
                at += if_true if accumulator == k else if_false
            case 0x25:
                at += if_true if accumulator > k else if_false
            case 0x06:
                return k
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
X86, ARM = 0xC000003E, 0xC00000B7
RDONLY, DIRECTORY, CLOEXEC = 0, os.O_DIRECTORY, os.O_CLOEXEC


@pytest.mark.parametrize(
    ("machine", "arch", "number", "arguments", "verdict"),
    [
        ("x86_64", X86, 0, (), ALLOW),  # read
        ("x86_64", X86, 231, (), ALLOW),  # exit_group
        ("x86_64", X86, 257, (0, 0, RDONLY | CLOEXEC | DIRECTORY), ALLOW),  # openat
        *[
            ("x86_64", X86, 257, (0, 0, flags), REFUSE)
            for flags in (os.O_WRONLY, os.O_RDWR, 3, os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_TMPFILE, 1 << 40 | 1)
        ],
        ("x86_64", X86, 2, (0, os.O_RDWR), REFUSE),  # open
        ("x86_64", X86, 302, (0,), ALLOW),  # prlimit64 of oneself
        ("x86_64", X86, 302, (1,), REFUSE),
        ("x86_64", X86, 72, (3, 1030), ALLOW),  # fcntl F_DUPFD_CLOEXEC
        ("x86_64", X86, 72, (3, 8), REFUSE),  # fcntl F_SETOWN
        # socket, clone, fork, vfork, execve, kill, rename, unlink, ptrace, prctl, mount, setns, io_uring_setup, openat2
        *[("x86_64", X86, n, (), REFUSE) for n in (41, 56, 57, 58, 59, 62, 82, 87, 101, 157, 165, 308, 425, 437)],
        ("x86_64", X86, 0x40000000, (), REFUSE),  # read, in disguise (x32)
        ("x86_64", X86, -1, (), REFUSE),
        ("x86_64", 0x40000003, 4, (), KILL),  # a 32-bit call
        ("x86_64", ARM, 63, (), KILL),
        ("aarch64", ARM, 63, (), ALLOW),  # read
        ("aarch64", ARM, 94, (), ALLOW),  # exit_group
        ("aarch64", ARM, 56, (0, 0, RDONLY), ALLOW),  # openat
        ("aarch64", ARM, 56, (0, 0, os.O_CREAT), REFUSE),
        ("aarch64", ARM, 261, (7,), REFUSE),  # prlimit64
        # socket, clone, execve, kill, unlinkat, renameat, ptrace, prctl, mount
        *[("aarch64", ARM, n, (), REFUSE) for n in (198, 220, 221, 129, 35, 38, 117, 167, 40)],
        ("aarch64", X86, 0, (), KILL),
    ],
)
def test_the_filter_decides_as_it_says(
    monkeypatch: pytest.MonkeyPatch, machine: str, arch: int, number: int, arguments: tuple[int, ...], verdict: int
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    program = seccomp.program()
    assert program is not None
    assert run_filter(program, arch, number, arguments) == verdict


def test_an_unknown_processor_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert seccomp.program() is None

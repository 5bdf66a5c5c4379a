"""Completions that attack: each costs its own sample at most, and nothing outside its process changes.

All payloads are scored in one call by one pool, good samples between bad ones, so order and isolation are tested too.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_gcpo.config.records import VerifyConfig
from megatron_gcpo.verify.pool import VerifierPool

from .support import TABLE, group, session_members

# An attack that must fail: anything but an error of the operating system is an escape, and "error" the status.
_CONTAINED = """
import os
def attempt():
{body}
try:
    attempt()
except ({errors}):
    reward = 1.0
else:
    raise SystemError("escaped")
"""


def contained(body: str, errors: str = "OSError") -> str:
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    return _CONTAINED.format(body=lines, errors=errors)


_LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_FRAME = """
import json, os, struct
body = json.dumps({"reward": 1.0, "status": "ok", "message": ""}).encode()
frame = struct.pack(">I", len(body)) + body
def everywhere(data):
    for fd in range(3, 1024):
        try:
            os.write(fd, data)
        except OSError:
            pass
"""

# name: (code, status, reward)
PAYLOADS: dict[str, tuple[str, str, float]] = {
    # Endless.
    "loop": ("while True: pass", "timeout", 0.0),
    "loop in C": ("9**9**9**9", "timeout", 0.0),
    "catastrophic regex": ("import re\nre.match(r'(a+)+$', 'a' * 64 + 'b')", "timeout", 0.0),
    "sleeps and ignores signals": (
        "import signal, time\n"
        "for s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(s, signal.SIG_IGN)\n"
        "while True: time.sleep(1000)",
        "timeout",
        0.0,
    ),
    "closes its pipe and stays": (
        "import os, time\nos.closerange(3, 100)\nwhile True: time.sleep(1000)",
        "killed",
        0.0,
    ),
    # Failing.
    "raises": ("1 / 0", "error", 0.0),
    "raises SystemExit": ("raise SystemExit(0)", "error", 0.0),
    "raises KeyboardInterrupt": ("raise KeyboardInterrupt", "error", 0.0),
    "raises what cannot be printed": (
        "class E(Exception):\n    def __str__(self): raise self\nraise E",
        "error",
        0.0,
    ),
    "deep recursion": ("f = lambda n: f(n + 1)\nf(0)", "error", 0.0),
    "exits": ("import os\nos._exit(0)", "killed", 0.0),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", "killed", 0.0),
    "aborts": ("import os\nos.abort()", "killed", 0.0),
    "allocates at once": ("bytearray(1 << 36)", "error", 0.0),
    "allocates bit by bit": ("hoard = []\nwhile True: hoard.append(bytearray(1 << 22))", "error", 0.0),
    "maps memory": ("import mmap\nhoard = [mmap.mmap(-1, 1 << 30) for _ in range(64)]", "error", 0.0),
    # Rewards that are none.
    "not a number": ("reward = float('nan')", "error", 0.0),
    "infinite": ("reward = float('inf')", "error", 0.0),
    "above one": ("reward = 1.0001", "error", 0.0),
    "below zero": ("reward = -1", "error", 0.0),
    "no float": ("reward = 'full marks'", "error", 0.0),
    # Floods.
    "prints a gigabyte": (
        "import sys\nblock = b'x' * (1 << 20)\nfor _ in range(1024): sys.stdout.buffer.write(block)\nreward = 1.0",
        "ok",
        1.0,
    ),
    "writes a gigabyte to stderr": (
        "import os\nblock = b'x' * (1 << 20)\nfor _ in range(1024): os.write(2, block)\nreward = 1.0",
        "ok",
        1.0,
    ),
    "floods its reply": (_FRAME + "while True: everywhere(frame * 1000)", "error", 0.0),
    # Lies. Of one reply of its own making nobody can tell that it is a lie; it still only speaks for itself.
    "lies about itself": (_FRAME + "everywhere(frame)\nos._exit(0)", "ok", 1.0),
    "lies about others": (_FRAME + "everywhere(frame * 8)\nreward = 0.0", "error", 0.0),
    "writes garbage": (_FRAME + "everywhere(b'\\xff' * 64)\nreward = 1.0", "error", 0.0),
    "replies nonsense": (_FRAME + "everywhere(struct.pack('>I', 3) + b'[[[')\nos._exit(0)", "error", 0.0),
    "replies an unknown status": (
        _FRAME + "body = body.replace(b'ok', b'OK')\neverywhere(struct.pack('>I', len(body)) + body)\nos._exit(0)",
        "error",
        0.0,
    ),
    "changes the judge's code": (
        "import builtins, math\nbuiltins.leak = True\nmath.isnan = None\nreward = 0.5",
        "killed",
        0.0,
    ),
    "finds no trace of the one before": (
        "import builtins, math\nassert not hasattr(builtins, 'leak')\nassert not math.isnan(1.0)\nreward = 0.25",
        "ok",
        0.25,
    ),
    # Processes.
    "fork bomb": (contained("for _ in range(100):\n    os.fork()"), "ok", 1.0),
    "fork bomb that insists": (
        "import os\nborn = 0\nfor _ in range(2000):\n"
        "    try:\n        born += os.fork() == 0\n    except OSError:\n        pass\n"
        "reward = float(born == 0)",
        "ok",
        1.0,
    ),
    "raw vfork, clone, clone3": (
        _LIBC + "assert all(libc.syscall(n, 0, 0, 0, 0, 0) == -1 for n in (56, 57, 58, 435))\nreward = 1.0",
        "ok",
        1.0,
    ),
    "starts a thread": (
        contained("import threading\nthreading.Thread(target=print).start()", "RuntimeError"),
        "ok",
        1.0,
    ),
    "starts a program": (contained("import subprocess\nsubprocess.run(['/bin/true'])"), "ok", 1.0),
    "becomes a program": (contained("os.execv('/bin/true', ['true'])"), "ok", 1.0),
    "kills the trainer": (contained("os.kill(extras['trainer'], 9)"), "ok", 1.0),
    "kills its worker": (contained("os.kill(os.getppid(), 9)"), "ok", 1.0),
    "kills everything": (contained("os.kill(-1, 9)"), "ok", 1.0),
    "kills its group": (contained("os.killpg(0, 9)"), "ok", 1.0),
    "signals through a descriptor": (
        contained("import fcntl\nfor fd in range(3, 64):\n    fcntl.fcntl(fd, 8, extras['trainer'])"),
        "ok",
        1.0,
    ),
    "traces its worker": (_LIBC + "import os\nreward = float(libc.ptrace(16, os.getppid(), 0, 0) == -1)", "ok", 1.0),
    "outlives its worker": (_LIBC + "reward = float(libc.prctl(1, 0, 0, 0, 0) == -1)", "ok", 1.0),
    # Files.
    "creates a file": (contained("open(extras['folder'] + '/created', 'w')"), "ok", 1.0),
    "creates a file at home": (contained("open('created', 'w')"), "ok", 1.0),
    "appends to a file": (contained("open(extras['file'], 'a').write('x')"), "ok", 1.0),
    "empties a file": (contained("os.truncate(extras['file'], 0)"), "ok", 1.0),
    "removes a file": (contained("os.unlink(extras['file'])"), "ok", 1.0),
    "renames a file": (contained("os.rename(extras['file'], extras['file'] + '.gone')"), "ok", 1.0),
    "opens a file to anyone": (contained("os.chmod(extras['file'], 0o777)"), "ok", 1.0),
    "makes a folder": (contained("os.mkdir(extras['folder'] + '/made')"), "ok", 1.0),
    "makes a link": (contained("os.symlink('/', extras['folder'] + '/link')"), "ok", 1.0),
    "makes a file in memory": (contained("os.memfd_create('x')"), "ok", 1.0),
    "new ways to open": (
        _LIBC + "import os\nhow = (ctypes.c_uint64 * 3)(os.O_RDWR, 0, 0)\n"
        "path = ctypes.c_char_p(extras['file'].encode())\n"
        "assert libc.syscall(437, -100, path, how, 24) == -1\n"  # openat2
        "assert libc.syscall(425, 1, ctypes.create_string_buffer(256)) == -1\n"  # io_uring_setup
        "reward = 1.0",
        "ok",
        1.0,
    ),
    "looks around at home": (
        "import os\ntry:\n    reward = float(not os.listdir('.'))\nexcept OSError:\n    reward = 1.0",
        "ok",
        1.0,
    ),
    "holds one descriptor": (
        "import os\ndef open_fd(fd):\n    try:\n        os.fstat(fd)\n        return True\n    except OSError:\n"
        "        return False\nreward = float(sum(map(open_fd, range(3, 4096))) == 1)",
        "ok",
        1.0,
    ),
    # Network.
    "connects to this machine": (
        contained("import socket\nsocket.socket().connect((b'127.0.0.1', extras['port']))"),
        "ok",
        1.0,
    ),
    "connects to a named socket": (contained("import socket\nsocket.socket(socket.AF_UNIX)"), "ok", 1.0),
    "sends a datagram": (
        contained("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9))"),
        "ok",
        1.0,
    ),
    # Secrets and privileges.
    "reads its environment": (
        "import os\nreward = float(not any('SECRET' in k for k in os.environ) and len(os.environ) == 0)",
        "ok",
        1.0,
    ),
    "reads the trainer's environment": (
        contained("open(f\"/proc/{extras['trainer']}/environ\", 'rb').read()"),
        "ok",
        1.0,
    ),
    "reads the trainer's memory": (contained("open(f\"/proc/{extras['trainer']}/mem\", 'rb').read(1)"), "ok", 1.0),
    "reads its worker's memory": (contained("open(f'/proc/{os.getppid()}/mem', 'rb').read(1)"), "ok", 1.0),
    "reads a file of the trainer": (contained("open(extras['secret']).read()"), "ok", 1.0),
    "raises its limits": (
        contained("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "OSError, ValueError"),
        "ok",
        1.0,
    ),
    "becomes root": (contained("os.setresuid(0, 0, 0)"), "ok", 1.0),
    "makes namespaces": (contained("os.unshare(os.CLONE_NEWUSER)"), "ok", 1.0),
    "mounts": (_LIBC + "reward = float(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == -1)", "ok", 1.0),
}
GOOD = "reward = 0.75"


@dataclass(frozen=True)
class Outcome:
    rewards: dict[str, float]
    statuses: dict[str, str]
    good: list[float]
    counts: dict[str, int]
    workers_before: list[int]
    workers_after: list[int]
    sessions_after: list[int]
    listener: socket.socket
    file: Path
    folder: Path


@pytest.fixture(scope="module")
def outcome() -> Iterator[Outcome]:
    folder = Path(tempfile.mkdtemp(prefix="victims-"))  # not in tmp_path, whose parents are closed to other users
    folder.chmod(0o777)
    file, secret = folder / "file", folder / "secret"
    file.write_text("kept")
    file.chmod(0o666)
    secret.write_text("secret")
    secret.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        extras = {
            "trainer": os.getpid(),
            "file": str(file),
            "folder": str(folder),
            "secret": str(secret),
            "port": listener.getsockname()[1],
        }
        groups = [group([code, GOOD], extras=extras) for code, _, _ in PAYLOADS.values()]
        config = VerifyConfig(name="payload", timeout_s=4, memory_mb=256, num_workers=4, isolation="standard")
        with VerifierPool(config, table=TABLE) as pool:
            before = [worker.pid for worker in pool._workers]
            verdicts = pool.score(groups)
            after = [worker.pid for worker in pool._workers]
            counts = pool.counts
            idle = [len(session_members(pid)) for pid in after]
        yield Outcome(
            rewards={name: float(v.rewards_G[0]) for name, v in zip(PAYLOADS, verdicts, strict=True)},
            statuses={name: v.statuses_G[0] for name, v in zip(PAYLOADS, verdicts, strict=True)},
            good=[float(v.rewards_G[1]) for v in verdicts],
            counts=counts,
            workers_before=before,
            workers_after=after,
            sessions_after=idle,
            listener=listener,
            file=file,
            folder=folder,
        )
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", PAYLOADS)
def test_an_attack_costs_its_own_sample_at_most(outcome: Outcome, name: str) -> None:
    _, status, reward = PAYLOADS[name]
    assert (outcome.statuses[name], outcome.rewards[name]) == (status, reward)


def test_good_samples_between_attacks_keep_their_place_and_reward(outcome: Outcome) -> None:
    assert outcome.good == [0.75] * len(PAYLOADS)


def test_attacks_are_counted(outcome: Outcome) -> None:
    wanted = [status for _, status, _ in PAYLOADS.values()]
    assert outcome.counts["verify/timeouts"] == wanted.count("timeout")
    assert outcome.counts["verify/errors"] == wanted.count("error")
    assert outcome.counts["verify/killed"] == wanted.count("killed")
    assert outcome.counts["verify/rejected"] == 0


def test_workers_survive_their_judges(outcome: Outcome) -> None:
    """Nothing a completion does costs the import of the verifier again: each worker is the same process, and alone."""
    assert outcome.workers_after == outcome.workers_before
    assert outcome.sessions_after == [1] * 4
    judges_lost = sum(status in ("timeout", "killed") for _, status, _ in PAYLOADS.values())
    assert outcome.counts["verify/restarts"] == judges_lost + 1  # "writes garbage" ends its judge too


def test_nothing_outside_changed(outcome: Outcome) -> None:
    assert outcome.file.read_text() == "kept"
    assert outcome.file.stat().st_mode & 0o777 == 0o666
    assert sorted(path.name for path in outcome.folder.iterdir()) == ["file", "secret"]
    with pytest.raises(BlockingIOError):
        outcome.listener.accept()


def test_nothing_is_left_running(outcome: Outcome) -> None:
    for pid in outcome.workers_after:
        assert session_members(pid) == []
        assert not Path(f"/proc/{pid}").exists()

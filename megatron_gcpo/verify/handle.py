"""The trainer's end of one worker: start, requests out, replies in, kill."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_gcpo.verify import wire
from megatron_gcpo.verify.base import Sample
from megatron_gcpo.verify.start import ID_BYTES, Start

_PACKAGE = Path(__file__).resolve().parents[1]
# -I: nothing of the trainer's environment or working directory chooses what is imported. Our package is loaded from
# where the trainer has it, installed or not, without putting its parent folder on the path.
_PROGRAM = """
import importlib.util, sys
init = sys.argv[1] + "/__init__.py"
spec = importlib.util.spec_from_file_location("megatron_gcpo", init, submodule_search_locations=[sys.argv[1]])
package = sys.modules["megatron_gcpo"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from megatron_gcpo.verify.worker import main
main(sys.argv[2:])
"""
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")},
}
_POLITE_EXIT_S = 1.0


@dataclass(frozen=True)
class Reply:
    """What a worker said of one sample."""

    index: int
    said: dict[str, Any]


class WorkerLost(Exception):
    """The worker died or broke the protocol."""


class WorkerHandle:
    """One worker process. Descriptors are non-blocking; ``flight`` holds what it has been sent and not answered."""

    def __init__(self, start: Start) -> None:
        self.flight: deque[tuple[str, int]] = deque()
        self.head_since = 0.0
        self.started = time.monotonic()
        self.ready: dict[str, Any] | None = None
        """What it found out about its confinement; None until it has loaded the verifier."""
        self.admitted = False
        """The pool has looked at ``ready`` and is content."""
        self.fault = ""
        """Why nothing more will be believed of it."""
        self._outbox = bytearray()
        self._hung_up = False
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        request_in, self.request_fd = os.pipe()
        self.reply_fd, reply_out = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM, str(_PACKAGE), str(request_in), str(reply_out)],
                pass_fds=(request_in, reply_out),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            os.close(self.request_fd)
            os.close(self.reply_fd)
            raise
        finally:
            os.close(request_in)
            os.close(reply_out)
        os.set_blocking(self.request_fd, False)
        os.set_blocking(self.reply_fd, False)
        self._replies = wire.Reader(self.reply_fd, wire.MAX_REPLY_BYTES)
        self._outbox += wire.frame(pickle.dumps(start))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outbox)

    def post(self, index: int, sample: Sample) -> None:
        """Queue one sample; ``write`` sends it."""
        token = secrets.token_bytes(ID_BYTES)
        if not self.flight:
            self.head_since = time.monotonic()
        self.flight.append((token.hex(), index))
        self._outbox += wire.frame(token + pickle.dumps(sample))

    def write(self) -> None:
        """Send what the pipe takes. Raises WorkerLost when nobody reads it any more."""
        try:
            while self._outbox:
                del self._outbox[: os.write(self.request_fd, self._outbox)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            raise WorkerLost("it no longer reads") from None

    def read(self) -> list[Reply]:
        """The verdicts that have arrived, in the order of the requests.

        ``fault`` is set when it ended, or sent something that is not the reply to the oldest request.
        """
        try:
            alive = self._replies.pull()
        except BlockingIOError:
            return []
        replies: list[Reply] = []
        try:
            for body in self._replies.frames():
                reply = self._accept(json.loads(body))
                replies += [reply] if reply is not None else []
        except (wire.BadFrame, ValueError, TypeError, KeyError, RecursionError) as error:
            self.fault = f"it broke the protocol ({type(error).__name__})"
        if not alive:
            self.fault = "it ended"
        return replies

    def _accept(self, said: dict[str, Any]) -> Reply | None:
        if self.ready is None:
            self.ready = {key: said[key] for key in ("measures", "held", "failures", "notes")}
            return None
        token, index = self.flight[0] if self.flight else ("", -1)
        if not token or not secrets.compare_digest(token, str(said["id"])):
            raise ValueError("a reply to another request")
        self.flight.popleft()
        self.head_since = time.monotonic()
        return Reply(index, said)

    def last_words(self) -> str:
        """The last line of its start-up log."""
        self._log.seek(0)
        lines = self._log.read()[-4096:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"

    def hang_up(self) -> None:
        """Close the requests: an idle worker then ends by itself. Safe to repeat."""
        if not self._hung_up:
            os.close(self.request_fd)
        self._hung_up = True

    def close(self, polite: bool = False) -> None:
        """End the worker and everything it started; ``polite`` gives it a moment to do so itself. Safe to repeat."""
        if self._process.returncode is not None:
            return
        self.hang_up()
        try:
            self._process.wait(_POLITE_EXIT_S if polite else 0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self.reply_fd)
        self._log.close()

"""The loop of a worker: hands each request to a confined judge and watches it. It never looks at model output itself."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gcpo.verify import judge, sandbox, wire
from megatron_gcpo.verify.base import Sample, Verifier
from megatron_gcpo.verify.judge import Verdict, clean
from megatron_gcpo.verify.start import ID_BYTES, Start

_ORPHAN_CHECK_S = 1.0


@dataclass
class _Judge:
    """A living judge."""

    pid: int
    verdicts: wire.Reader
    sample_fd: int | None
    """Where a judge that lives on takes samples from."""


class Supervisor:
    """Answers requests in order, one judge at a time."""

    def __init__(
        self, start: Start, verifier: Verifier, requests: wire.Reader, reply_fd: int, readable: tuple[str, ...] = ()
    ) -> None:
        self._start, self._verifier = start, verifier
        self._requests, self._reply_fd = requests, reply_fd
        self._cpu_s = int(start.timeout_s) + 2
        limits = sandbox.Limits(memory_bytes=start.memory_bytes, cpu_s=self._cpu_s if start.evaluates else None)
        self._confinement = sandbox.Confinement.plan(limits, readable)
        self._queue: deque[bytes] = deque()
        self._judge: _Judge | None = None
        self._deadline = 0.0  # of the sample being judged, on the monotonic clock; 0: none is
        self._parent = os.getppid()
        self._restarts = 0

    def try_out(self, measures: list[str]) -> dict[str, Any]:
        """What confinement achieves here, from a judge that tries to get out."""
        confinement, trainer = self._confinement, self._start.trainer_pid
        child = self._fork(lambda _, verdict_fd: judge.report(trainer, confinement, verdict_fd, self._verifier))
        found = None
        deadline = time.monotonic() + max(10.0, self._start.timeout_s)
        while found is None and select.select([child.verdicts.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            alive = child.verdicts.pull()
            found = next(iter(child.verdicts.frames()), None)
            if not alive:
                break
        status = self._bury(child)
        if found is None:
            raise RuntimeError(f"the confined judge ended without a word (wait status {status})")
        said = json.loads(found)
        notes = []
        if "uid" in said["measures"] and not _readable_by_all(Path(os.__file__)):
            notes.append(f"{Path(os.__file__).parent} is closed to other users: judges can not import late")
        return {
            "measures": sorted([*measures, *said["measures"]]),
            "held": said["held"],
            "failures": said["failures"],
            "notes": notes,
        }

    def serve(self, bodies: Sequence[bytes]) -> None:
        """Until the trainer closes the requests or dies."""
        self._queue.extend(bodies)
        while True:
            if not self._deadline:
                self._begin_next()
            running = self._deadline > 0
            poll = select.poll()
            poll.register(self._requests.fd, select.POLLIN)
            if running:
                assert self._judge is not None
                poll.register(self._judge.verdicts.fd, select.POLLIN)
            left_s = self._deadline - time.monotonic() if running else _ORPHAN_CHECK_S
            ready = [fd for fd, _ in poll.poll(1000 * min(max(left_s, 0.0), _ORPHAN_CHECK_S))]
            if os.getppid() != self._parent:
                break
            if self._requests.fd in ready:
                if not self._requests.pull():
                    break
                self._queue.extend(self._requests.frames())
            if running:
                self._watch(ready)
        if self._judge is not None:
            self._bury(self._judge)

    def _begin_next(self) -> None:
        """Hand the first request of the queue to a judge."""
        while self._queue:
            body = self._queue[0][ID_BYTES:]
            try:
                sample: Sample = pickle.loads(body)
                self._verifier.prepare(sample)
            except ValueError as error:
                self._reply({"misuse": str(error)[:2000]})
                continue
            except Exception as error:
                self._finish(Verdict(reward=0.0, status="error", message=clean(f"{type(error).__name__}: {error}")))
                continue
            self._deadline = time.monotonic() + self._start.timeout_s
            if self._start.evaluates:
                self._judge = self._fork(
                    lambda _, verdict_fd, sample=sample: judge.run_once(
                        self._verifier, sample, self._confinement, verdict_fd
                    )
                )
            else:
                self._hand_over(body)
            return

    def _hand_over(self, body: bytes) -> None:
        """Send a sample to the judge that lives on; a judge that died idle is replaced."""
        for _ in range(2):
            if self._judge is None:
                self._judge = self._fork(
                    lambda sample_fd, verdict_fd: judge.run_on(
                        self._verifier, self._confinement, sample_fd, verdict_fd, self._cpu_s
                    )
                )
            assert self._judge.sample_fd is not None, "got a judge for one sample, expected one that lives on"
            try:
                wire.send(self._judge.sample_fd, body)
                return
            except BrokenPipeError:
                self._replace()
        raise RuntimeError("judges die before they are given anything")

    def _watch(self, ready: Sequence[int]) -> None:
        """Look at the running judge: a verdict, its end, or its deadline."""
        assert self._judge is not None, "got no judge, expected the running one"
        if self._judge.verdicts.fd in ready:
            alive = self._judge.verdicts.pull()
            try:
                found = self._judge.verdicts.frames()
            except wire.BadFrame as error:
                self._replace()
                self._finish(Verdict(reward=0.0, status="error", message=str(error)))
                return
            if found:
                # More than one verdict for one sample: somebody else is talking.
                if self._start.evaluates or len(found) > 1:
                    self._replace(planned=self._start.evaluates)
                said = found[0] if len(found) == 1 else b""
                self._finish(Verdict.parse(said))
            elif not alive:
                self._finish(self._died(self._replace()))
        elif time.monotonic() >= self._deadline:
            self._replace()
            self._finish(Verdict(reward=0.0, status="timeout", message=f"no verdict after {self._start.timeout_s:g} s"))

    def _died(self, status: int) -> Verdict:
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            return Verdict(reward=0.0, status="timeout", message=f"no verdict after {self._cpu_s} CPU seconds")
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        return Verdict(reward=0.0, status="killed", message=f"the judge died of {how}")

    def _finish(self, verdict: Verdict) -> None:
        self._deadline = 0.0
        self._reply({"reward": verdict.reward, "status": verdict.status, "message": verdict.message})

    def _reply(self, said: dict[str, Any]) -> None:
        request = self._queue.popleft()
        said |= {"id": request[:ID_BYTES].hex(), "restarts": self._restarts}
        self._restarts = 0
        wire.send(self._reply_fd, json.dumps(said).encode())

    def _fork(self, life: Callable[[int, int], None]) -> _Judge:
        """Start a judge; ``life(sample_fd, verdict_fd)`` is all it does."""
        verdict_in, verdict_out = os.pipe()
        sample_in, sample_out = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                life(sample_in, verdict_out)
            finally:
                os._exit(1)
        os.close(verdict_out)
        os.close(sample_in)
        return _Judge(pid=pid, verdicts=wire.Reader(verdict_in, wire.MAX_VERDICT_BYTES), sample_fd=sample_out)

    def _replace(self, planned: bool = False) -> int:
        assert self._judge is not None, "got no judge, expected the running one"
        status = self._bury(self._judge)
        self._judge = None
        self._restarts += not planned
        return status

    @staticmethod
    def _bury(child: _Judge) -> int:
        """Kill and reap; returns the wait status, which tells of an earlier death if there was one."""
        os.kill(child.pid, signal.SIGKILL)
        os.close(child.verdicts.fd)
        if child.sample_fd is not None:
            os.close(child.sample_fd)
        return os.waitpid(child.pid, 0)[1]


def _readable_by_all(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in path.parents)

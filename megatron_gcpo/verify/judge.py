"""The confined side: a fork of the worker that looks at model output and writes its verdict to one pipe.

What it writes is not trusted. Code that a completion smuggles in runs in this very process and could write the verdict
itself: it can lie about its own sample, and about nothing else. The process holds no other descriptor, knows no request
id, lives for one sample when the verifier evaluates what it is given, and can neither signal nor inspect the worker.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import resource
import signal
from collections.abc import Collection
from dataclasses import dataclass

from megatron_gcpo.verify import wire
from megatron_gcpo.verify.base import Rejected, Sample, Verifier
from megatron_gcpo.verify.probe import attempt_escape
from megatron_gcpo.verify.sandbox import Confinement

SAID_BY_JUDGES = ("ok", "error", "rejected")
STATUSES = (*SAID_BY_JUDGES, "timeout", "killed")
_MAX_MESSAGE_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one sample."""

    reward: float
    """In [0, 1]; 0 unless the status is "ok"."""
    status: str
    """One of STATUSES."""
    message: str = ""
    """Why, for a log; printable ASCII of bounded length, whatever the judge sent."""

    @classmethod
    def parse(cls, body: bytes, statuses: Collection[str] = SAID_BY_JUDGES) -> Verdict:
        """A verdict from bytes that a judge wrote; "error" when they are not one."""
        try:
            said = json.loads(body)
            reward, status, message = float(said["reward"]), said["status"], str(said["message"])
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return cls(reward=0.0, status="error", message="the judge's reply makes no sense")
        if status not in statuses:
            return cls(reward=0.0, status="error", message="the judge's reply has an unknown status")
        if not 0 <= reward <= 1:
            return cls(reward=0.0, status="error", message=f"the reward is {reward}, expected a number from 0 to 1")
        return cls(reward=reward if status == "ok" else 0.0, status=status, message=clean(message))

    def dump(self) -> bytes:
        return json.dumps({"reward": self.reward, "status": self.status, "message": self.message}).encode()


def clean(text: str) -> str:
    """Text that a hostile process sent, safe for a terminal."""
    return "".join(c if " " <= c <= "~" else "?" for c in text[:_MAX_MESSAGE_CHARACTERS])


def evaluate(verifier: Verifier, sample: Sample) -> Verdict:
    """Judge one sample in this process; whatever the verifier raises becomes a status."""
    try:
        reward = float(verifier.judge(sample))
    except Rejected as error:
        return Verdict(reward=0.0, status="rejected", message=clean(str(error)))
    except BaseException as error:  # hostile code may raise SystemExit, KeyboardInterrupt or its own classes
        return Verdict(reward=0.0, status="error", message=_explain(error))
    if math.isnan(reward) or not 0 <= reward <= 1:
        return Verdict(reward=0.0, status="error", message=f"the reward is {reward}, expected a number from 0 to 1")
    return Verdict(reward=reward, status="ok")


def _explain(error: BaseException) -> str:
    name = type(error).__name__
    with contextlib.suppress(BaseException):  # its __str__ is hostile too
        return clean(f"{name}: {error}")
    return clean(name)


def run_once(verifier: Verifier, sample: Sample, confinement: Confinement, verdict_fd: int) -> None:
    """The life of a judge that sees one sample. Never returns."""
    _enter(confinement, (verdict_fd,))
    wire.send(verdict_fd, evaluate(verifier, sample).dump())
    os._exit(0)


def run_on(verifier: Verifier, confinement: Confinement, sample_fd: int, verdict_fd: int, cpu_s: int) -> None:
    """The life of a judge that sees one sample after another, each with its own CPU limit. Never returns."""
    _enter(confinement, (sample_fd, verdict_fd))
    samples = wire.Reader(sample_fd, wire.MAX_REQUEST_BYTES)
    while samples.pull():
        for body in samples.frames():
            used = math.ceil(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (used + cpu_s, resource.RLIM_INFINITY))
            wire.send(verdict_fd, evaluate(verifier, pickle.loads(body)).dump())
    os._exit(0)


def _enter(confinement: Confinement, keep: tuple[int, ...]) -> list[str]:
    """Let go of everything the worker holds, then confine."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    kept: list[int] = sorted((*keep, *([] if confinement.file_rules is None else [confinement.file_rules])))
    for first, last in zip((3, *[fd + 1 for fd in kept]), (*kept, 1 << 16), strict=True):
        os.closerange(first, last)
    return confinement.enter()


def report(trainer_pid: int, confinement: Confinement, verdict_fd: int, verifier: Verifier) -> None:
    """The life of the first judge of a worker: tries to get out, judges the warm samples. Never returns."""
    measures = _enter(confinement, (verdict_fd,))
    held = attempt_escape(trainer_pid)
    failures = [v.message for v in (evaluate(verifier, s) for s in verifier.warm) if v.status == "error"]
    wire.send(verdict_fd, json.dumps({"measures": measures, "held": held, "failures": failures[:1]}).encode())
    os._exit(0)

"""The transformers engine in a process of its own, so that it draws while the trainer trains.

In the trainer's process both would share one interpreter, and take turns. Two sockets lead to the process: one for
``generate``, which may take long, one for everything else, which must not wait for it.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from megatron_gcpo.rollout.engine import Sample, SampleRequest, Sampling

END_S = 5.0
"""How long the process may take to end when it is no longer wanted, before it is killed."""
DONE, ABANDONED = "done", "abandoned"
"""What ends a stream of weights: all were sent, or the sender failed."""


class EngineProcess:
    """A RolloutEngine like ``TransformersEngine``, whose options it takes, in a child process.

    The child ends with this object, and with this process however it ends. When the child is gone, every call raises
    ValueError.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_batch_rows: int,
        return_routed_experts: bool = False,
        num_threads: int,
    ) -> None:
        """num_threads: of the child's tensor operations. Raises what the engine's own construction raises."""
        pairs = [socket.socketpair() for _ in range(2)]
        theirs = [pair[1] for pair in pairs]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_gcpo.rollout.engine_worker", *(str(s.fileno()) for s in theirs)],
            stdin=subprocess.DEVNULL,
            pass_fds=[s.fileno() for s in theirs],
        )
        for end in theirs:
            end.close()
        self._control, self._work = (_Line(Connection(pair[0].detach()), self._process) for pair in pairs)
        self._end = weakref.finalize(self, _end, self._process, [self._control, self._work])
        options = {
            "device": device,
            "dtype": dtype,
            "max_batch_rows": max_batch_rows,
            "return_routed_experts": return_routed_experts,
        }
        self._max_positions: int = self._control.ask("construct", hf_config, options, num_threads)

    @property
    def policy_version(self) -> int:
        return self._control.ask("policy_version")

    @property
    def max_positions(self) -> int:
        return self._max_positions

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        return self._work.ask("generate", requests, sampling)

    def score(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        return self._control.ask("score", sequences, temperature)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int | None = None) -> None:
        with self._control.conversation() as connection:
            send(connection, ("load_weights", (version,)))
            try:
                for name, tensor in weights:
                    whole = tensor.detach().to("cpu").contiguous()
                    send(connection, (name, whole.dtype, tuple(whole.shape)))
                    connection.send_bytes(whole.flatten().view(torch.uint8).numpy())
            except BaseException:
                # the child must not serve what it has so far, and must be ready for the next call
                with contextlib.suppress(OSError, EOFError):
                    send(connection, ABANDONED)
                    receive(connection)
                raise
            send(connection, DONE)
            _unpack(receive(connection))

    @property
    def control(self) -> None:
        return None

    def commit(self, version: int) -> None:
        raise AssertionError("got a commit, expected load_weights: it is the way to this engine's weights")

    def pause(self) -> None:
        self._control.ask("pause")

    def resume(self) -> None:
        self._control.ask("resume")

    def refuse(self, reason: str) -> None:
        self._control.ask("refuse", reason)

    def sleep(self) -> None:
        self._control.ask("sleep")

    def wake(self) -> None:
        self._control.ask("wake")

    def close(self) -> None:
        """End the process; what it was drawing is lost."""
        self._end()


class _Line:
    """One socket to the process: a question, then its answer. Threads take turns."""

    def __init__(self, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        self.connection = connection
        self._process = process
        self._turn = threading.Lock()

    def ask(self, method: str, *arguments: Any) -> Any:
        with self.conversation() as connection:
            send(connection, (method, arguments))
            return _unpack(receive(connection))

    @contextmanager
    def conversation(self) -> Iterator[Connection]:
        with self._turn:
            try:
                yield self.connection
            except (EOFError, OSError) as error:
                raise ValueError(self._obituary()) from error

    def _obituary(self) -> str:
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return "the process of the rollout engine does not answer any more"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"the process of the rollout engine {how}; resume the run, and look at its log for the reason"


def send(connection: Connection, message: Any) -> None:
    """Not Connection.send: when that fails, its traceback holds a buffer that Python 3.12 cannot garbage-collect."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """What the other side of a private socket sent."""
    return pickle.loads(connection.recv_bytes())


def _unpack(answer: tuple[str | None, Any]) -> Any:
    """What the child returned; raises what it raised."""
    failure, value = answer
    if failure is None:
        return value
    raise ValueError(value) if failure == "ValueError" else RuntimeError(f"rollout engine: {failure}: {value}")


def _end(process: subprocess.Popen[bytes], lines: Sequence[_Line]) -> None:
    for line in lines:
        line.connection.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

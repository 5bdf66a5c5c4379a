"""The child of ``rollout.engine_process``: answers for a transformers engine until its parent is gone."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from megatron_gcpo.rollout.engine_process import ABANDONED, DONE, receive, send
from megatron_gcpo.rollout.transformers_engine import TransformersEngine


def main(control: Connection, work: Connection) -> None:
    """Two threads, so that a pause reaches an engine that is drawing."""
    method, (hf_config, options, num_threads) = receive(control)
    assert method == "construct", f"got {method!r} first, expected construct"
    torch.set_num_threads(num_threads)
    engines: list[TransformersEngine] = []

    def construct() -> int:
        engines.append(TransformersEngine(hf_config, **options))
        return engines[0].max_positions

    _answer(control, construct)
    if engines:
        threading.Thread(target=_serve, args=(engines[0], work), daemon=True).start()
        _serve(engines[0], control)


def _serve(engine: TransformersEngine, connection: Connection) -> None:
    while True:
        try:
            method, arguments = receive(connection)
        except EOFError:
            # the parent is gone; whatever the other thread is drawing has no reader
            os._exit(0)
        _answer(connection, lambda m=method, a=arguments: _call(engine, connection, m, a))


def _call(engine: TransformersEngine, connection: Connection, method: str, arguments: tuple[Any, ...]) -> Any:
    if method == "load_weights":
        arriving = _arriving(connection)
        try:
            return engine.load_weights(arriving, version=arguments[0])
        finally:
            for _ in arriving:
                pass
    if method == "policy_version":
        return engine.policy_version
    return getattr(engine, method)(*arguments)


def _answer(connection: Connection, call: Any) -> None:
    try:
        answer = (None, call())
    except Exception as error:  # all of them belong to the parent, which raises them there
        answer = (type(error).__name__, str(error))
    try:
        send(connection, answer)
    except OSError:
        os._exit(0)


def _arriving(connection: Connection) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream of weights that follows a call of load_weights."""
    while (header := receive(connection)) != DONE:
        if header == ABANDONED:
            raise ValueError("the sender gave up in the middle")
        name, dtype, shape = header
        tensor = torch.empty(shape, dtype=dtype)
        connection.recv_bytes_into(tensor.flatten().view(torch.uint8).numpy())
        yield name, tensor


if __name__ == "__main__":
    main(*(Connection(int(descriptor)) for descriptor in sys.argv[1:3]))

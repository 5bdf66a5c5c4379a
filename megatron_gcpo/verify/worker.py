"""A worker: loads one verifier, then forks a confined judge for the samples the trainer sends, and watches it.

The worker itself never looks at model output, so it stays trusted and alive: a judge that hangs, crashes or lies is
killed and replaced by a fork in milliseconds, without importing the verifier again. It is started as a program of its
own (never forked from the trainer, which holds threads and devices) with descriptors for requests and replies.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
from collections.abc import Sequence

from megatron_gcpo.verify import judge, sandbox, wire
from megatron_gcpo.verify.start import Start, load
from megatron_gcpo.verify.supervisor import Supervisor


def main(arguments: Sequence[str]) -> None:
    request_fd, reply_fd = map(int, arguments)
    requests = wire.Reader(request_fd, wire.MAX_REQUEST_BYTES)
    bodies: list[bytes] = []
    while not bodies:
        if not requests.pull():
            return
        bodies = requests.frames()
    start: Start = pickle.loads(bodies[0])
    os.environ.clear()
    sandbox.offer_to_the_oom_killer()
    sandbox.enter_empty_folder()
    measures = sandbox.isolate()
    sandbox.hide_memory()
    verifier = load(start.module, start.attribute)(**start.options)
    for sample in verifier.warm:
        verifier.prepare(sample)
        judge.evaluate(verifier, sample)
    readable = (start.module,) if start.module.endswith(".py") else ()
    supervisor = Supervisor(start, verifier, requests, reply_fd, readable)
    gc.collect()
    gc.freeze()  # judges share our objects; collecting them there would copy their pages
    ready = supervisor.try_out(measures)
    _silence()
    wire.send(reply_fd, json.dumps(ready).encode())
    supervisor.serve(bodies[1:])


def _silence() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)

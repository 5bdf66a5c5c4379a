"""One connection from a pusher to all workers of its engine, kept from push to push."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_gcpo.config.records import PushConfig
from megatron_gcpo.reshard.transport import Outlet, Section, make_outlet, shm
from megatron_gcpo.reshard.transport.base import NUM_SLOTS
from megatron_gcpo.reshard.transport.place import gpu_id, host_id, process_id
from megatron_gcpo.reshard.transport.table import choose
from megatron_gcpo.rollout.engine import WeightControl

log = logging.getLogger(__name__)

TIMEOUT_S = 120.0
"""How long one end of a transport waits for the other in the middle of a push."""


@dataclass(kw_only=True)
class Channel:
    """The leader's end. Every method raises ValueError when a worker fails, is gone, or does not answer."""

    control: WeightControl
    transport: str
    workers: tuple[str, ...]
    """Names of the workers, in the order in which ``control`` reaches them."""
    outlet: Outlet
    bucket_bytes: int
    verify: bool
    connection: str
    """Tells the workers this channel from others."""
    _calls: ThreadPoolExecutor = field(repr=False)
    """Runs the calls to the workers, which return when they have taken a bucket."""
    _moves: ThreadPoolExecutor = field(repr=False)
    """Runs the transport's end of the same buckets, one after the other."""
    _sending: list[Future[None] | None] = field(default_factory=lambda: [None] * NUM_SLOTS, repr=False)
    _push: str = ""
    _num_sent: int = 0

    @classmethod
    def open(
        cls,
        control: WeightControl,
        config: PushConfig,
        *,
        device: torch.device,
        folder: Path,
        bucket_bytes: int,
        alone: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> Channel:
        """Ask the workers where they are, choose the transport, and connect; ``share`` comes next.

        device: the pusher's; the buffers lie on it. folder: for transport file. alone: nobody else fills the buffers.
        """
        described = control.rpc("gcpo_describe")
        kind = config.transport
        if kind == "auto":
            kind = choose(
                in_process=all(w["process"] == process_id() for w in described),
                alone=alone,
                shares_memory=all(w["host"] == host_id() for w in described) and shm.fits(bucket_bytes),
                gpus=[w["gpu"] for w in described],
                own_gpu=gpu_id(device),
            )
        workers = tuple(w["name"] for w in described)
        outlet = make_outlet(
            kind,
            bucket_bytes,
            workers,
            device=device,
            folder=folder,
            loopback=all(w["host"] == host_id() for w in described),
            timeout_s=timeout_s,
        )
        calls, moves = _thread("push-call", device), _thread("push-move", device)
        channel = cls(
            control=control,
            transport=kind,
            workers=workers,
            outlet=outlet,
            bucket_bytes=bucket_bytes,
            verify=config.fingerprint,
            connection=uuid.uuid4().hex,
            _calls=calls,
            _moves=moves,
        )
        try:
            init = {"connection": channel.connection, "transport": kind, "info": outlet.init_info()}
            joining = calls.submit(control.init_weight_transfer_engine, init)
            outlet.connect()
            joining.result()
        except BaseException:
            channel.close()
            raise
        return channel

    def is_current(self) -> bool:
        """Whether the workers are still connected: not started again, and nobody else's (another pusher, ``deliver``)."""
        described = self.control.rpc("gcpo_describe")
        return all(w["connection"] == self.connection for w in described) and len(described) == len(self.workers)

    def begin(self, *, whole: bool, upon: str | None = None) -> None:
        """Start a push; what broke off before is cleared away.

        upon: the weights that stay, below the adapters that this push brings (adapters.AdapterPush.base); None: all
            weights come anew.
        """
        self._push, self._num_sent = uuid.uuid4().hex, 0
        kept = {} if upon is None else {"upon": upon}
        self.control.rpc("gcpo_begin", {"push": self._push, "whole": whole, "verify": self.verify, **kept})
        self.control.start_weight_update()

    def free_slot(self) -> int:
        """The next buffer to fill, after what it held has been taken by all workers."""
        slot = self._num_sent % NUM_SLOTS
        self._wait(slot)
        return slot

    def send(self, sections: Mapping[str, Section], extra: Mapping[str, Any] | None = None) -> None:
        """Deliver the buffer of the last ``free_slot``; returns at once: the other one can be filled meanwhile.

        extra: more of rollout.vllm.worker.UpdateInfo.
        """
        slot = self._num_sent % NUM_SLOTS
        info = {"push": self._push, "bucket": self._num_sent, **(extra or {})}
        self._sending[slot] = self._moves.submit(self._move, slot, sections, info)
        self._num_sent += 1

    def compare(self, expected: Mapping[str, Mapping[str, int]]) -> None:
        """After the last bucket: hold what came against what was sent. ``control.finish_weight_update`` may follow.

        expected: by worker and tensor, the fingerprint of what it should have got; not looked at when fingerprints are off.

        Raises ValueError, naming the tensors, when a worker has something else.
        """
        for slot in range(NUM_SLOTS):
            self._wait(slot)
        problems = []
        for report in self.control.rpc("gcpo_report", {"push": self._push}):
            wanted = expected[report["name"]] if self.verify else {}
            problems += _differences(report, wanted, self._num_sent)
        if problems:
            raise ValueError("; ".join(dict.fromkeys(problems)))

    def abandon(self) -> None:
        """Clear an unfinished push away, as far as the workers can still be reached. Raises nothing."""
        for future in self._sending:
            if future is not None:
                future.exception()
        self._sending = [None] * NUM_SLOTS
        try:
            self.control.rpc("gcpo_abandon")
        except ValueError as error:
            log.warning("a broken push could not be cleared away on the engine's workers: %s", error)

    def close(self) -> None:
        self._moves.shutdown()
        self._calls.shutdown()
        self.outlet.close()

    def _wait(self, slot: int) -> None:
        future, self._sending[slot] = self._sending[slot], None
        if future is not None:
            future.result()

    def _move(self, slot: int, sections: Mapping[str, Section], info: dict[str, Any]) -> None:
        info["message"] = self.outlet.message(slot, sections)
        taking = self._calls.submit(self.control.update_weights, info)
        try:
            self.outlet.send(slot, sections)
        finally:
            taking.result()


def _thread(name: str, device: torch.device) -> ThreadPoolExecutor:
    if device.type == "cuda":  # which GPU is the current one is a matter of each thread
        return ThreadPoolExecutor(1, name, initializer=torch.cuda.set_device, initargs=(device,))
    return ThreadPoolExecutor(1, name)


def _differences(report: Mapping[str, Any], wanted: Mapping[str, int], num_buckets: int) -> list[str]:
    if report["num_buckets"] != num_buckets:
        return [f"{report['num_buckets']} of {num_buckets} buckets arrived"]
    if report["incomplete"]:
        return [f"only parts arrived of {_some(report['incomplete'])}"]
    marks = report["marks"]
    problems = []
    if missing := sorted(wanted.keys() - marks.keys()):
        problems.append(f"nothing arrived of {_some(missing)}")
    if wrong := sorted(name for name in wanted.keys() & marks.keys() if wanted[name] != marks[name]):
        problems.append(f"other bytes arrived than were sent of {_some(wrong)}")
    return problems


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more tensors" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more

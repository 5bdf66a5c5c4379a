"""No rank waits for ever: who is missing, and where they were last seen.

Every rank tells the common store which phase it is in and, from a thread, that it is alive. Three things end a wait:

- ``barrier``: ranks that did not arrive in time are named, with the phase each was last in;
- an error of a collective inside ``phase``: gloo raises at once when a peer dies, after the timeout when one is late;
- the thread: a rank whose signs of life stop, or that reported a failure, ends the others, whatever they hang in (NCCL
  raises nothing in the thread that waits).

Ranks watch their neighbour on a ring, so that the store sees a few requests per rank and second at any size.
"""

# pyright: reportPrivateImportUsage=false
# torch.distributed documents its stores without listing them as exported.

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import torch.distributed as dist

from megatron_gcpo.cluster import failure, launch
from megatron_gcpo.cluster.failure import PeerLost

MAX_SILENCE_S = 120.0
"""A process that shows no sign of life for this long is dead; shorter with a shorter timeout."""
STORE_GONE = "the meeting point of the ranks is gone: rank 0 (or torchrun), which hosts it, or its machine died"


class Watch:
    """The deadlines of one rank; a context manager around its whole work.

    An exception that leaves the context is announced to the other ranks, which then end with it as their reason.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        on_lost: Callable[[str], None] = launch.abandon,
    ) -> None:
        """``timeout_s``: how long to wait for peers.  ``on_lost``: how the thread ends this rank, given the reason."""
        self._store = dist.PrefixStore("watch", store)
        # A blocking request holds its connection: the thread has one of its own.
        self._thread_store = dist.PrefixStore("watch", store.clone())  # pyright: ignore[reportAttributeAccessIssue]
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._beat_s = min(2.0, timeout_s / 20)
        self._silence_s = min(MAX_SILENCE_S, timeout_s / 2)
        self._on_lost = on_lost
        self._phase = "start"
        self._barriers = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_watch, name="deadline", daemon=True)

    def __enter__(self) -> Self:
        self._enter_phase(self._phase)
        self._store.set(_beat_key(self._rank), "0")
        if self._world_size > 1:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After a success all ranks leave together, since rank 0 may be hosting the store; after a failure at once."""
        try:
            if error is None:
                self.barrier("finish")
                with self._store_may_be_gone():
                    self._leave_last_if_hosting()
            elif isinstance(error, Exception) and not isinstance(error, PeerLost):
                with contextlib.suppress(dist.DistError):
                    self._announce(self._store, f"rank {self._rank} failed in {self._phase}: {failure.describe(error)}")
        finally:
            self._closing.set()
            if self._thread.is_alive():
                self._thread.join()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say that this rank is in a phase, and give the errors of its collectives a readable reason (PeerLost)."""
        outer = self._phase
        self._enter_phase(name)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PeerLost) or not is_collective_error(error):
                raise
            # The source of the raw error is of no use to the user; the log has it.
            raise PeerLost(self._explain()) from error
        self._enter_phase(outer)

    def barrier(self, name: str) -> None:
        """Wait until all ranks have called it as often as we have.

        Raises PeerLost at the timeout, naming who did not come, or as soon as a peer is known to be lost.
        """
        outer = self._phase
        self._barriers += 1
        self._enter_phase(name)
        with self._store_may_be_gone():
            self._wait_for_all(name)
        self._enter_phase(outer)

    def _wait_for_all(self, name: str) -> None:
        if self._store.check(["lost"]):  # arriving now, we would open the barrier to ourselves
            raise PeerLost(self._ending(self._store))
        done = f"barrier/{self._barriers}/done"
        if self._store.add(f"barrier/{self._barriers}", 1) == self._world_size:
            self._store.set(done, "1")
            if self._barriers > 1:
                self._forget_barrier(self._barriers - 1)
        deadline = time.monotonic() + self._timeout_s
        pause_s = 0.0005
        while not self._store.check([done]):
            if self._store.check(["lost"]):
                raise PeerLost(self._ending(self._store))
            if time.monotonic() > deadline:
                raise PeerLost(self._announce(self._store, self._describe_missing(name)))
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.02 + 1e-4 * self._world_size)

    def _enter_phase(self, name: str) -> None:
        self._phase = name
        with self._store_may_be_gone():
            self._store.set(_phase_key(self._rank), json.dumps([self._barriers, self._phase]))

    @contextlib.contextmanager
    def _store_may_be_gone(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise PeerLost(f"rank {self._rank} ends in {self._phase}: {STORE_GONE}") from error

    def _forget_barrier(self, number: int) -> None:
        # Everybody has arrived at the next one, so nobody looks at this one any more.
        self._store.delete_key(f"barrier/{number}")
        self._store.delete_key(f"barrier/{number}/done")

    def _leave_last_if_hosting(self) -> None:
        left = self._store.add("left", 1)
        deadline = time.monotonic() + self._timeout_s
        while self._rank == 0 and left < self._world_size and time.monotonic() < deadline:
            time.sleep(0.005)
            left = self._store.add("left", 0)

    def _describe_missing(self, barrier: str) -> str:
        missing = []
        for rank in range(self._world_size):
            barriers, phase = self._last_seen(self._store, rank)
            if barriers < self._barriers:
                missing.append(f"rank {rank} (last in {phase})")
        return f"rank {self._rank} waited {self._timeout_s:g} s before {barrier} for {_some(missing)}"

    def _explain(self) -> str:
        """Why a collective of ours failed: what another rank announced, else who stopped showing signs of life."""
        where = f"rank {self._rank}: a collective failed in {self._phase}"
        try:
            ranks = [rank for rank in range(self._world_size) if rank != self._rank]
            before = [_read(self._store, _beat_key(rank)) for rank in ranks]
            for _ in range(6):
                time.sleep(self._beat_s / 2)
                if self._store.check(["lost"]):
                    return self._ending(self._store)
            after = [_read(self._store, _beat_key(rank)) for rank in ranks]
            dead = [rank for rank, was, now in zip(ranks, before, after, strict=True) if was == now != b""]
            if dead:
                return self._announce(self._store, self._describe_dead(self._store, dead))
            elsewhere = []
            for rank in ranks:
                _, phase = self._last_seen(self._store, rank)
                if phase != self._phase:
                    elsewhere.append(f"rank {rank} (in {phase})")
            late = f"not there: {_some(elsewhere)}" if elsewhere else "all ranks are alive and in the same phase"
            return self._announce(self._store, f"{where}; {late}")
        except dist.DistError:
            return f"{where}; {STORE_GONE}"

    def _describe_dead(self, store: dist.Store, dead: Sequence[int]) -> str:
        names = [f"rank {rank} (last in {self._last_seen(store, rank)[1]})" for rank in dead]
        return f"{_some(names)} died or was killed; noticed by rank {self._rank} in {self._phase}"

    def _ending(self, store: dist.Store) -> str:
        return f"rank {self._rank} ends in {self._phase}: {store.get('lost').decode()}"

    def _announce(self, store: dist.Store, reason: str) -> str:
        """Tell all ranks why the run ends; the first reason stays, and is returned."""
        return store.compare_set("lost", "", reason).decode()

    def _last_seen(self, store: dist.Store, rank: int) -> tuple[int, str]:
        """Barriers passed or reached, and phase, of a rank; it may not have entered its watch yet."""
        barriers, phase = json.loads(_read(store, _phase_key(rank)) or b'[0, "start"]')
        return barriers, phase

    def _keep_watch(self) -> None:
        store = self._thread_store
        neighbour = (self._rank + 1) % self._world_size
        beats, heard, heard_at = 0, b"", time.monotonic()
        while not self._closing.wait(self._beat_s):
            try:
                beats += 1
                store.set(_beat_key(self._rank), str(beats))
                if store.check(["lost"]):
                    reason = self._ending(store)
                else:
                    now = _read(store, _beat_key(neighbour))
                    # Whoever has not entered its watch yet is late at most; barriers and collectives judge that.
                    if now != heard or not now:
                        heard, heard_at = now, time.monotonic()
                    if time.monotonic() - heard_at < self._silence_s:
                        continue
                    reason = self._announce(store, self._describe_dead(store, [neighbour]))
            except RuntimeError:  # whatever the store raises: a watch that dies unseen watches nobody
                reason = f"rank {self._rank} ends in {self._phase}: {STORE_GONE}"
            # The main thread may be about to end for the same reason, with a traceback and a clean exit: let it.
            if not self._closing.wait(4 * self._beat_s):
                self._on_lost(reason)
            return


def is_collective_error(error: BaseException) -> bool:
    """True for errors of torch.distributed, which mean that a peer is gone or late.

    Gloo's are plain RuntimeErrors; they begin with the source file that raised them.
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def _read(store: dist.Store, key: str) -> bytes:
    """The value, or nothing where a plain ``get`` would wait for somebody to set it."""
    return store.get(key) if store.check([key]) else b""


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _phase_key(rank: int) -> str:
    return f"phase/{rank}"


def _some(names: Sequence[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

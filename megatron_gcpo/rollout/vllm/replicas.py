"""Requests over several rollout servers: balanced, bounded in time, and issued again elsewhere when a server fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gcpo.config.records import VllmConfig
from megatron_gcpo.rollout.vllm.contract import GENERATE
from megatron_gcpo.rollout.vllm.http import BadAnswer, NoAnswer, Rejected, Stalled
from megatron_gcpo.rollout.vllm.replica import QUICK_S, Replica

log = logging.getLogger(__name__)

HEALTH_EVERY_S = 5.0
MISSES = 3
"""Health checks in a row without an answer after which a server counts as gone."""
STRIKES = 3
"""Failed requests in a row after which a server is left out, as long as there are others."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request to whichever server takes it. Asked again, it is the same: token ids, seed and all."""

    body: Mapping[str, Any]
    read: Callable[[Replica, Any], Any]
    """The answer's meaning; raises BadAnswer."""
    who: str
    """Names the request in errors."""
    score_temperature: float | None = None
    """At which the server's workers must score prompts."""


class Replicas:
    """The servers of one engine. All methods belong to the event loop's thread."""

    def __init__(self, replicas: Sequence[Replica], settings: VllmConfig, *, capacity: int) -> None:
        self.all = tuple(replicas)
        self._settings, self._capacity = settings, capacity
        self._changed = asyncio.Condition()
        self._running = asyncio.Event()
        self._running.set()
        self._clock = _Clock()
        self._refused = _new_future()
        self._gone = {replica: _new_future() for replica in self.all}
        """Why a server left, once it has."""
        self._strikes = dict.fromkeys(self.all, 0)

    @property
    def serving(self) -> list[Replica]:
        return [replica for replica in self.all if replica.state == "serving"]

    @property
    def reachable(self) -> list[Replica]:
        return [replica for replica in self.all if replica.state != "out"]

    def describe(self) -> str:
        """Why nothing is served, by server."""
        reasons = {"unverified": "no complete push was verified on it since it started", "serving": "it serves"}
        states = [f"{r.url}: {reasons.get(r.state, r.out_because)}" for r in self.all]
        return f"none of the {len(self.all)} rollout servers can serve ({'; '.join(states)})"

    async def answer(self, questions: Sequence[Question]) -> list[Any]:
        """The meaning of every answer, in the order of the questions: all of them, or ValueError."""
        watch = asyncio.create_task(self._watch())
        tasks = [asyncio.create_task(self._answer_one(question)) for question in questions]
        work = asyncio.gather(*tasks)
        refused = self._refused
        try:
            await asyncio.wait({work, refused}, return_when=asyncio.FIRST_COMPLETED)
            if refused.done():
                raise ValueError(refused.result())
            return work.result()
        finally:
            for task in (watch, *tasks):
                task.cancel()
            await asyncio.gather(watch, *tasks, return_exceptions=True)
            if work.done() and not work.cancelled():
                work.exception()  # looked at, so that it is not reported as forgotten

    async def _answer_one(self, question: Question) -> Any:
        failures: list[str] = []
        tried: set[Replica] = set()
        while len(failures) <= self._settings.max_retries:
            await self._running.wait()
            async with self._taken(tried) as replica:
                try:
                    answer = question.read(replica, await self._ask(replica, question))
                except Rejected as error:
                    raise ValueError(f"a rollout server refused {question.who}: {error}") from None
                except (NoAnswer, BadAnswer) as error:
                    failures.append(str(error))
                    tried.add(replica)
                    await self._judge(replica, error)
                else:
                    self._strikes[replica] = 0
                    return answer
        raise ValueError(
            f"{question.who} failed {len(failures)} times on rollout servers, which is all that "
            f"rollout.vllm.max_retries={self._settings.max_retries} allows; at last: {failures[-1]}"
        )

    @contextlib.asynccontextmanager
    async def _taken(self, tried: set[Replica]) -> AsyncIterator[Replica]:
        """The least busy server with room, one that was not tried before if possible."""
        async with self._changed:
            while True:
                if not self.serving:
                    raise ValueError(self.describe())
                free = [r for r in self.serving if r.in_flight < self._capacity]
                if free:
                    break
                await self._changed.wait()
            replica = min(free, key=lambda r: (r in tried, r.in_flight))
            replica.in_flight += 1
        try:
            yield replica
        finally:
            replica.in_flight -= 1
            async with self._changed:
                self._changed.notify()

    async def _ask(self, replica: Replica, question: Question) -> Any:
        if question.score_temperature is not None:
            async with replica.lock:
                if replica.score_temperature != question.score_temperature:
                    await replica.set_score_temperature(question.score_temperature)
        timeout_s = self._settings.request_timeout_s
        deadline = self._clock.now() + timeout_s
        asking = asyncio.create_task(replica.call(GENERATE, question.body, timeout_s=None))
        gone = self._gone[replica]
        try:
            while not asking.done():
                left_s = deadline - self._clock.now()
                if gone.done():
                    raise NoAnswer(f"{replica.url} is out: {gone.result()}")
                if left_s <= 0:
                    raise Stalled(
                        f"{replica.url} did not answer within {timeout_s:g} s (rollout.vllm.request_timeout_s)"
                    )
                await asyncio.wait({asking, gone}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            return asking.result()
        finally:
            asking.cancel()  # closing the connection makes the server forget the request
            await asyncio.gather(asking, return_exceptions=True)

    async def _judge(self, replica: Replica, error: NoAnswer | BadAnswer) -> None:
        """After a failed request: does the server stay?"""
        self._strikes[replica] += 1
        others = len(self.serving) > 1
        if others and (isinstance(error, Stalled) or self._strikes[replica] >= STRIKES):
            await self.leave(replica, str(error))
            return
        async with replica.lock:
            if replica.state != "serving":
                return
            try:
                same = await replica.is_same_process()
            except (NoAnswer, BadAnswer):
                await self.leave(replica, str(error))
            else:
                if not same:
                    await self.leave(replica, _STARTED_AGAIN)

    async def leave(self, replica: Replica, because: str) -> None:
        """Out until a complete push is verified on it; what it was asked is asked elsewhere."""
        if replica.state == "out":
            return
        replica.leave(because)
        if not self._gone[replica].done():
            self._gone[replica].set_result(because)
        log.warning("the rollout server %s is out: %s", replica.url, because)
        async with self._changed:
            self._changed.notify_all()

    def admit(self, replica: Replica) -> None:
        """Its weights were verified: it serves."""
        if self._gone[replica].done():
            self._gone[replica] = _new_future()
        self._strikes[replica] = 0
        replica.state = "serving"

    def refuse(self, reason: str) -> None:
        """Break off every request under way."""
        if not self._refused.done():
            self._refused.set_result(reason)

    def accept(self) -> None:
        """Undo ``refuse`` for requests to come."""
        if self._refused.done():
            self._refused = _new_future()

    async def pause(self) -> None:
        self._running.clear()
        self._clock.stop()
        # kept requests lose their cached keys and values, which belong to the old weights
        await self.everywhere("/pause", query={"mode": "keep", "clear_cache": "true"})

    async def resume(self) -> None:
        await self.everywhere("/resume")
        self._clock.go()
        self._running.set()

    @property
    def is_paused(self) -> bool:
        return not self._running.is_set()

    async def everywhere(self, path: str, query: Mapping[str, str] | None = None) -> None:
        """POST to every server that is not out; one that fails is out."""

        async def tell(replica: Replica) -> None:
            try:
                await replica.call(path, {}, query=query, timeout_s=self._settings.request_timeout_s)
            except (NoAnswer, BadAnswer, Rejected) as error:
                await self.leave(replica, str(error))

        await asyncio.gather(*(tell(replica) for replica in self.reachable))

    async def _watch(self) -> None:
        """Servers whose machine vanished break no connection: ask those that owe an answer how they are."""
        misses = dict.fromkeys(self.all, 0)

        async def look(replica: Replica) -> None:
            try:
                same = await replica.is_same_process(QUICK_S)
            except (NoAnswer, BadAnswer) as error:
                misses[replica] += 1
                if misses[replica] >= MISSES:
                    await self.leave(replica, str(error))
                return
            misses[replica] = 0
            if not same:
                await self.leave(replica, _STARTED_AGAIN)

        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            await asyncio.gather(*(look(r) for r in self.serving if r.in_flight and not self.is_paused))


def _new_future() -> asyncio.Future[str]:
    return asyncio.get_running_loop().create_future()


class _Clock:
    """Seconds that were not spent in a pause."""

    def __init__(self) -> None:
        self._stopped_s: float | None = None
        self._paused_s = 0.0

    def now(self) -> float:
        return (time.monotonic() if self._stopped_s is None else self._stopped_s) - self._paused_s

    def stop(self) -> None:
        if self._stopped_s is None:
            self._stopped_s = time.monotonic()

    def go(self) -> None:
        if self._stopped_s is not None:
            self._paused_s += time.monotonic() - self._stopped_s
            self._stopped_s = None


_STARTED_AGAIN = "it holds other weights than it was given: it was started again, or another trainer uses it"

"""A pool of worker processes that score groups; nothing a completion does costs more than its own sample."""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Self

import numpy as np

from megatron_gcpo.config.records import VerifyConfig
from megatron_gcpo.types import Group, Verdicts
from megatron_gcpo.verify.base import Sample
from megatron_gcpo.verify.handle import Reply, WorkerHandle, WorkerLost
from megatron_gcpo.verify.judge import STATUSES, Verdict, clean
from megatron_gcpo.verify.probe import GUARANTEES, Isolation
from megatron_gcpo.verify.start import Start
from megatron_gcpo.verify.table import VERIFIERS, Row, create

logger = logging.getLogger(__name__)

_WINDOW = 4
"""Samples sent ahead to a worker: enough to hide the round trip, few enough that a slow one delays few others."""
_GRACE_S = 15.0
"""How much later than the worker the trainer itself calls a sample late, and then kills the worker."""
_START_TIMEOUT_S = 300.0
_MAX_WAIT_S = 60.0
_MAX_FAILED_STARTS = 3
_MAX_LOGGED = 5
_COUNTERS = {"timeout": "timeouts", "error": "errors", "killed": "killed", "rejected": "rejected"}


class VerifierPool:
    """Scores groups with the verifier that ``verify.name`` names. A context manager; safe to use from any thread."""

    def __init__(self, config: VerifyConfig, *, table: Mapping[str, Row] = VERIFIERS) -> None:
        """Starts the workers and waits until each has loaded the verifier and tried its own confinement.

        Raises:
            ValueError: unknown verifier or option, a missing package, or less isolation than ``verify.isolation`` asks.
            RuntimeError: a worker does not start.
        """
        self._config = config
        verifier = create(config.name, config.options, table)
        row = table[config.name]
        self._start = Start(
            module=row.module,
            attribute=row.attribute,
            options=asdict(verifier),
            evaluates=row.evaluates,
            timeout_s=config.timeout_s,
            memory_bytes=config.memory_mb << 20,
            trainer_pid=os.getpid(),
        )
        self._lock = threading.Lock()
        self._failed_starts = self._logged = 0
        self._counts = self._zero_counts()
        self._workers: list[WorkerHandle] = []
        self._isolation: Isolation | None = None
        try:
            self._workers += [WorkerHandle(self._start) for _ in range(config.num_workers)]
            while not all(worker.admitted for worker in self._workers):
                for slot, _ in self._exchange()[1]:
                    raise RuntimeError(f"verifier {config.name} does not start: {self._workers[slot].last_words()}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every worker and whatever it started. Safe to repeat."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.hang_up()
        for worker in workers:
            worker.close(polite=worker.admitted and not worker.flight)

    @property
    def isolation(self) -> Isolation:
        """What the workers were found unable to do."""
        assert self._isolation is not None, "got a pool that never started"
        return self._isolation

    @property
    def counts(self) -> dict[str, int]:
        """Of the last ``score``: samples by status, and workers or judges that were lost and replaced (restarts)."""
        return dict(self._counts)

    def score(self, groups: Sequence[Group]) -> list[Verdicts]:
        """Verdicts of every rollout, in the order given.

        Raises:
            ValueError: a prompt does not fit the verifier (what to set is said).
            RuntimeError: the pool is closed, or workers can no longer be started.
        """
        with self._lock:
            if not self._workers:
                raise RuntimeError("the verifier pool is closed")
            self._counts = self._zero_counts()
            samples = [
                Sample(group.prompt.text, group.prompt.answer, dict(group.prompt.extras), rollout.text)
                for group in groups
                for rollout in group.rollouts
            ]
            try:
                verdicts = self._judge(samples)
            except BaseException:
                # Answers to what is still under way must not meet the next call.
                for slot, worker in enumerate(self._workers):
                    if worker.flight:
                        self._restart(slot)
                raise
        for verdict in verdicts:
            if verdict.status != "ok":
                self._counts[f"verify/{_COUNTERS[verdict.status]}"] += 1
        flat = iter(verdicts)
        return [_verdicts([next(flat) for _ in group.rollouts]) for group in groups]

    @staticmethod
    def _zero_counts() -> dict[str, int]:
        return dict.fromkeys([*(f"verify/{name}" for name in _COUNTERS.values()), "verify/restarts"], 0)

    def _judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        todo = deque(range(len(samples)))
        verdicts: dict[int, Verdict] = {}
        while len(verdicts) < len(samples):
            for worker in self._workers:
                while todo and worker.admitted and len(worker.flight) < _WINDOW:
                    index = todo.popleft()
                    worker.post(index, samples[index])
            replies, losses = self._exchange()
            for reply in replies:
                verdicts[reply.index] = self._verdict(reply)
            for slot, loss in losses:
                # The oldest sample is the one that was being judged; the others go to whoever is free.
                indices = [index for _, index in self._workers[slot].flight]
                verdicts |= dict.fromkeys(indices[:1], loss)
                todo.extendleft(reversed(indices[1:]))
                self._counts["verify/restarts"] += 1
                self._restart(slot)
        return [verdicts[index] for index in range(len(samples))]

    def _exchange(self) -> tuple[list[Reply], list[tuple[int, Verdict]]]:
        """Wait until something happens: replies, and the workers lost with what to say of their oldest sample."""
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.reply_fd, select.POLLIN)
            if worker.wants_to_write:
                poll.register(worker.request_fd, select.POLLOUT)
        due_s = min(self._due(worker) for worker in self._workers) - time.monotonic()
        ready = {fd for fd, _ in poll.poll(1000 * min(max(0.0, due_s), _MAX_WAIT_S))}
        replies: list[Reply] = []
        losses: list[tuple[int, Verdict]] = []
        for slot, worker in enumerate(self._workers):
            try:
                got = worker.read() if worker.reply_fd in ready else []
                replies += got
                if worker.request_fd in ready:
                    worker.write()
                if worker.ready is not None and not worker.admitted:
                    self._admit(worker)
                if worker.fault:
                    raise WorkerLost(worker.fault)
                if not got and time.monotonic() >= self._due(worker):
                    losses.append((slot, Verdict(reward=0.0, status="timeout", message="its worker does not answer")))
            except WorkerLost as error:
                losses.append((slot, Verdict(reward=0.0, status="killed", message=f"its worker was lost: {error}")))
        return replies, losses

    def _due(self, worker: WorkerHandle) -> float:
        """When a worker that stays silent counts as lost (monotonic clock)."""
        if worker.ready is None:
            return worker.started + _START_TIMEOUT_S
        return worker.head_since + self._config.timeout_s + _GRACE_S if worker.flight else float("inf")

    def _admit(self, worker: WorkerHandle) -> None:
        """Believe a worker that has loaded the verifier, if it is confined as well as it has to be."""
        assert worker.ready is not None, "got a worker that is not ready"
        if worker.ready["failures"]:
            raise RuntimeError(
                f"verifier {self._config.name} fails when confined: {clean(str(worker.ready['failures'][0]))}. "
                "Its packages must be readable for every user, or be loaded by the verifier's warm samples"
            )
        isolation = Isolation(
            measures=tuple(worker.ready["measures"]),
            guarantees=tuple(name for name in GUARANTEES if name in worker.ready["held"]),
            notes=tuple(worker.ready["notes"]),
        )
        isolation.check(self._config.isolation)
        if self._isolation is None:
            self._isolation = isolation
            for name in isolation.missing:
                logger.warning("on this machine model output could make a verifier %s", GUARANTEES[name])
        self._failed_starts = 0
        worker.admitted = True

    def _restart(self, slot: int) -> None:
        lost = self._workers[slot]
        self._failed_starts += lost.ready is None
        last_words = lost.last_words() if lost.ready is None else ""
        lost.close()
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self.close()
            raise RuntimeError(f"verifier workers do not start any more: {last_words}")
        self._workers[slot] = WorkerHandle(self._start)

    def _verdict(self, reply: Reply) -> Verdict:
        said = reply.said
        if "misuse" in said:
            raise ValueError(str(said["misuse"]))
        self._counts["verify/restarts"] += int(said["restarts"])
        verdict = Verdict.parse(json.dumps(said).encode(), STATUSES)
        if verdict.status == "error" and self._logged < _MAX_LOGGED:
            self._logged += 1
            logger.warning("verifier %s: %s", self._config.name, verdict.message)
        return verdict


def _verdicts(verdicts_G: Sequence[Verdict]) -> Verdicts:
    return Verdicts(
        rewards_G=np.array([verdict.reward for verdict in verdicts_G], dtype=np.float32),
        statuses_G=tuple(verdict.status for verdict in verdicts_G),
    )

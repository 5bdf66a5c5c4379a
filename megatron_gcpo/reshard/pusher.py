"""Pushes of one run: chooses how, keeps the connection and the plan, and lets an engine serve only what arrived whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.config.records import PushConfig
from megatron_gcpo.policy.model import Policy
from megatron_gcpo.reshard import sharded
from megatron_gcpo.reshard.link import Link, gather_or_raise, make_link
from megatron_gcpo.reshard.push import push, refusing
from megatron_gcpo.reshard.push_adapters import push_adapters
from megatron_gcpo.reshard.source import Unsliceable
from megatron_gcpo.reshard.stats import Phases, PushStats
from megatron_gcpo.rollout.engine import RolloutEngine

log = logging.getLogger(__name__)


class Trained(Protocol):
    """Where the weights are: the actor."""

    @property
    def policy(self) -> Policy: ...

    def gather_parameters(self) -> None:
        """Finish what makes the parameters those of the last update."""
        ...

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective: (Hugging Face name, whole tensor)."""
        ...


class Pusher:
    """Gives the policy of a trainer to the engine of its replica; all methods but ``close`` are collective over all ranks."""

    def __init__(
        self, trained: Trained, topology: Topology, config: PushConfig, folder: Path, *, adapters_alone: bool = False
    ) -> None:
        """
        folder: for transport file; all machines see it.
        adapters_alone: engines take adapters; the weights below go with the first push only.
        """
        self.trained, self.topology, self.config, self.folder = trained, topology, config, folder
        self.adapters_alone = adapters_alone
        self.why_full: str | None = None
        """Why pushes go in whole tensors although the configuration let us choose; None: they do not, so far."""
        self._link: Link | None = None
        self._broken = False
        """On a leader: the last push over the link failed."""

    def push(self, engine: RolloutEngine | None, version: int | None = None) -> PushStats:
        """Give the engine the policy's weights as this version.

        engine: on leaders; None on their peers. version: None: one more than before.

        Raises:
            ValueError: on a leader whose engine did not get every tensor whole; that engine refuses to serve until a
                complete push. Its peers return: they learn of it by the leader's end.
        """
        self.trained.gather_parameters()
        if self.adapters_alone:
            return push_adapters(self.trained.policy, self.topology, self.config, self.folder, engine, version)
        start_s, phases = time.monotonic(), Phases()
        link = None
        with refusing(engine, "weights"):
            if self._may_be_sharded(engine):
                with phases("plan"):
                    link = self._link = self._link or self._make_link(engine)
            if link is not None:
                self._send(link, engine, version, phases)
        if link is None:
            return push(self.trained.export(), engine, version=version)
        plan = next(lane.plan for lane in link.lanes if lane.leader == self.topology.leader)
        return PushStats(
            mode="sharded",
            transport=link.transport,
            num_tensors=len(plan.specs),
            num_bytes=plan.num_bytes,
            minimal_bytes=plan.minimal_bytes,
            seconds=time.monotonic() - start_s,
            phases=phases.seconds,
        )

    def close(self) -> None:
        """Let go of the engine's workers and of shared memory; not collective."""
        link, self._link = self._link, None
        if link is not None and link.channel is not None:
            link.channel.close()

    def _may_be_sharded(self, engine: RolloutEngine | None) -> bool:
        """Alike on all ranks. Forgets a link whose workers are not the ones it was made for.

        Raises ValueError on all ranks when an engine has no workers left.
        """
        here: tuple[bool, bool] | ValueError | None = None
        if engine is not None:
            try:
                here = (engine.control is not None, self._link is None or self._is_stale(self._link, engine))
            except ValueError as error:
                here = error
        leaders = [there for there in gather_or_raise(self.topology, here) if there is not None]
        if any(stale for _, stale in leaders):
            self.close()
        return self.config.mode != "full" and all(has_workers for has_workers, _ in leaders)

    def _is_stale(self, link: Link, engine: RolloutEngine) -> bool:
        assert link.channel is not None, "got a leader without a channel"
        try:
            return self._broken or link.channel.control is not engine.control or not link.channel.is_current()
        except ValueError as error:
            log.warning("the rollout engine does not answer: %s", error)
            return True

    def _make_link(self, engine: RolloutEngine | None) -> Link | None:
        """None: whole tensors must do, ``why_full``; alike on all ranks.

        Raises ValueError on all ranks when an engine cannot be reached, or when rollout.push.mode forbids whole tensors.
        """
        if self.why_full is not None:
            return None
        try:
            return make_link(self.trained.policy, self.topology, self.config, self.folder, engine)
        except Unsliceable as error:
            if self.config.mode == "sharded":
                raise ValueError(f"rollout.push.mode is sharded, but {error}: set it to auto") from error
            self.why_full = str(error)
            if self.topology.rank == 0:
                log.warning("weights are pushed as whole tensors: %s", error)
            return None

    def _send(self, link: Link, engine: RolloutEngine | None, version: int | None, phases: Phases) -> None:
        """One push over the link. Raises ValueError on a leader whose engine did not take it, after all have walked."""
        channel, failed = link.channel, None
        if channel is not None:
            try:
                channel.begin(whole=False)
            except ValueError as error:
                failed = error
        verify = self.config.fingerprint
        failed = sharded.send_shards(
            link.lanes, link.shards, channel, self.topology, link.pg, phases, verify=verify, failed=failed
        )
        expected: dict[str, dict[str, int]] = {}
        for lane in link.lanes:
            marks = sharded.expected_marks(lane, link.pg)
            expected = marks if lane.leader == self.topology.rank else expected
        if channel is None or engine is None:
            return
        self._broken = True
        try:
            if failed is not None:
                raise failed
            with phases("finish"):
                channel.compare(expected)
                number = engine.policy_version + 1 if version is None else version
                channel.control.finish_weight_update(number)
                engine.commit(number)
        except ValueError:
            channel.abandon()
            raise
        self._broken = False

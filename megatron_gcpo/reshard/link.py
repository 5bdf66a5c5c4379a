"""What a push of shards rests on: both sides' layouts, the plan between them, and the connections. Made once, kept.

Everything here is collective over all ranks, and every error is raised on all of them: a rank that went on alone would wait
forever for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.config.records import PushConfig
from megatron_gcpo.policy.model import Policy
from megatron_gcpo.reshard import sharded
from megatron_gcpo.reshard.channel import Channel
from megatron_gcpo.reshard.fingerprint import dtype_name, dtype_named
from megatron_gcpo.reshard.source import LocalShards, Unsliceable, local_shards
from megatron_gcpo.reshard.transport.place import host_id
from megatron_gcpo.rollout.engine import RolloutEngine, WeightControl


@dataclass(frozen=True, kw_only=True)
class Link:
    """What lasts from push to push in mode sharded."""

    shards: LocalShards
    lanes: Sequence[sharded.Lane]
    """Those that this rank takes part in."""
    pg: dist.ProcessGroup
    """Everybody in these lanes."""
    channel: Channel | None
    """On leaders."""
    transport: str


def make_link(
    policy: Policy, topology: Topology, config: PushConfig, folder: Path, engine: RolloutEngine | None
) -> Link:
    """Learn both sides' layouts, plan, and connect.

    Raises:
        Unsliceable: whole tensors must do, and why.
        ValueError: an engine cannot be reached.
    """
    mine: LocalShards | None = None
    here: Any
    try:
        mine = local_shards(policy)
        here = sharded.RankShards(
            host=host_id(),
            replica=topology.replica,
            held=mine.held,
            dtypes=tuple(dtype_name(parameter.dtype) for parameter in mine.parameters),
        )
    except Unsliceable as error:
        here = error
    ranks = gather_or_raise(topology, here)
    assert mine is not None, "got no shards and no reason"
    tensors = sharded.tensor_list(ranks)
    asked = None
    if engine is not None:
        assert engine.control is not None, "got an engine without workers"
        asked = _needs_or_error(engine.control, topology.rank, tensors)
    engines = [there for there in gather_or_raise(topology, asked) if there is not None]
    lanes = _lanes(topology, config, ranks, engines, tensors)
    failed = gather_or_raise(topology, lanes if isinstance(lanes, Unsliceable) else None)
    assert not isinstance(lanes, Unsliceable), f"got {failed}, expected the error to be raised everywhere"
    return _connect(topology, config, folder, engine, mine, lanes)


def gather_or_raise(topology: Topology, here: Any) -> list[Any]:
    """What every rank says, by rank; the first ValueError that one says is raised on all of them."""
    box: list[Any] = [None] * topology.world_size
    dist.all_gather_object(box, here, group=topology.world_cpu_pg)
    for there in box:
        if isinstance(there, ValueError):
            raise there
    return box


def _lanes(
    topology: Topology,
    config: PushConfig,
    ranks: list[sharded.RankShards],
    engines: list[sharded.EngineNeeds],
    tensors: list[list[Any]],
) -> list[sharded.Lane] | Unsliceable:
    """The own replica's, or all where experts live in other replicas; or why there can be none."""
    try:
        lane_of = {there.leader: there for there in engines}
        own = sharded.make_lane(ranks, lane_of[topology.leader], tensors, topology.rank, config.bucket_bytes)
        if not sharded.spans_replicas(own, ranks):
            return [own]
        return [
            own
            if leader == topology.leader
            else sharded.make_lane(ranks, there, tensors, topology.rank, config.bucket_bytes)
            for leader, there in lane_of.items()
        ]
    except ValueError as error:
        return Unsliceable(str(error))


def _connect(
    topology: Topology,
    config: PushConfig,
    folder: Path,
    engine: RolloutEngine | None,
    mine: LocalShards,
    lanes: list[sharded.Lane],
) -> Link:
    """Open the channel of every engine, and everybody the leaders' buffers."""
    here: Any = None
    channel = None
    if engine is not None:
        own = next(lane for lane in lanes if lane.leader == topology.rank)
        try:
            channel = _open(engine, config, topology, folder, own)
            here = (channel.transport, channel.outlet.shared_path, channel.bucket_bytes)
        except ValueError as error:
            here = error
    try:
        told = gather_or_raise(topology, here)
    except ValueError:
        if channel is not None:
            channel.close()
        raise
    for lane in lanes:
        sharded.open_slots(lane, topology.rank, channel, told[lane.leader])
    gather_or_raise(topology, None)  # everybody has opened them
    if channel is not None:
        channel.outlet.connected()
    return Link(
        shards=mine,
        lanes=lanes,
        pg=topology.replica_cpu_pg if len(lanes) == 1 else topology.world_cpu_pg,
        channel=channel,
        transport=told[topology.leader][0],
    )


def _open(engine: RolloutEngine, config: PushConfig, topology: Topology, folder: Path, lane: sharded.Lane) -> Channel:
    assert engine.control is not None, "got an engine without workers"
    plan = lane.plan
    channel = Channel.open(
        engine.control,
        config,
        device=topology.platform.device,
        folder=folder,
        bucket_bytes=max(bucket.num_bytes for bucket in plan.buckets),
        alone=all(move.rank == topology.rank for bucket in plan.buckets for move in bucket.moves),
    )
    arguments = {
        "tensors": [spec.to_json() for spec in plan.specs],
        "buckets": {
            worker: [[piece.to_json() for piece in pieces] for pieces in plan.pieces(worker)]
            for worker in channel.workers
        },
    }
    try:
        engine.control.rpc("gcpo_plan", arguments)
    except ValueError:
        channel.close()
        raise
    return channel


def _needs_or_error(control: WeightControl, leader: int, tensors: list[list[Any]]) -> sharded.EngineNeeds | ValueError:
    try:
        traced = control.rpc("gcpo_trace", {"tensors": tensors})
    except ValueError as error:
        return error
    for worker in traced:
        if worker["reason"] is not None:
            return Unsliceable(worker["reason"])
        if worker["unfed"]:
            names = ", ".join(map(repr, worker["unfed"][:3]))
            return Unsliceable(f"the trainer has no tensors for the engine's parameters {names}")
    dtypes: dict[int, str] = {}
    for tensor, _, dtype in (need for worker in traced for need in worker["needs"]):
        dtypes[tensor] = max(dtypes.get(tensor, dtype), dtype, key=lambda name: dtype_named(name).itemsize)
    return sharded.EngineNeeds(
        leader=leader,
        needs=tuple(
            (worker["name"], tensor, tuple((start, stop) for start, stop in box))
            for worker in traced
            for tensor, box, _ in worker["needs"]
        ),
        dtypes=dtypes,
    )

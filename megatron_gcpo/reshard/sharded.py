"""Each worker gets exactly what its own parameters need, straight from the ranks that hold it.

A *lane* is one engine: its leader, its workers, its plan. Every rank copies its share of each bucket into the leader's
buffer, through shared memory where it can, else as one message; the leader delivers a full bucket while the next one is
filled. Dense models have one lane per replica, of that replica's ranks alone; experts that are spread over replicas make all
ranks take part in all lanes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.reshard import boxes
from megatron_gcpo.reshard.boxes import Box
from megatron_gcpo.reshard.channel import Channel
from megatron_gcpo.reshard.fingerprint import add, dtype_named, fingerprint, word_bytes
from megatron_gcpo.reshard.plan import Fragment, Move, Need, Plan, make_plan
from megatron_gcpo.reshard.source import Held, LocalShards
from megatron_gcpo.reshard.stats import Phases
from megatron_gcpo.reshard.transport.base import NUM_SLOTS
from megatron_gcpo.reshard.transport.shm import map_slots
from megatron_gcpo.reshard.transport.table import ON_DEVICE
from megatron_gcpo.reshard.wire import TensorSpec


@dataclass(frozen=True, kw_only=True)
class RankShards:
    """What the others know of a rank's shards."""

    host: str
    replica: int
    held: tuple[tuple[int, Held], ...]
    dtypes: tuple[str, ...]
    """Of its parameters."""


@dataclass(frozen=True, kw_only=True)
class EngineNeeds:
    """What the workers of one engine take of the trainer's tensors."""

    leader: int
    """Global rank."""
    needs: tuple[tuple[str, int, Box], ...]
    """(worker, index of the tensor, box)."""
    dtypes: Mapping[int, str]
    """Of the parameters that each tensor ends in: the widest."""


@dataclass(kw_only=True)
class Lane:
    """One engine, as a rank sees it."""

    leader: int
    plan: Plan
    own: tuple[tuple[Move, ...], ...]
    """This rank's moves of each bucket."""
    shared: frozenset[int]
    """Ranks that write into the leader's buffers themselves."""
    on_device: bool = False
    """Whether the buffers lie on the trainer's device, and what is sent to them goes over its own network."""
    slots: Sequence[torch.Tensor] = ()
    """The leader's buffers, where this rank can write into them."""
    marks: dict[tuple[str, int], int] = field(default_factory=dict)
    """Fingerprints by (worker, tensor) of what this rank has sent in this push."""


def tensor_list(ranks: Sequence[RankShards]) -> list[list[Any]]:
    """[name, shape, dtype] of every Hugging Face tensor that the ranks hold together, in the order of travel.

    Raises ValueError when ranks disagree on a tensor.
    """
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for rank in ranks:
        for parameter, held in rank.held:
            here = (held.shape, rank.dtypes[parameter])
            if found.setdefault(held.name, here) != here:
                raise ValueError(f"ranks disagree on {held.name!r}: {here} and {found[held.name]}")
    return [[name, list(found[name][0]), found[name][1]] for name in sorted(found, key=_natural)]


def make_lane(
    ranks: Sequence[RankShards], engine: EngineNeeds, tensors: Sequence[Sequence[Any]], rank: int, bucket_bytes: int
) -> Lane:
    """The lane of one engine as ``rank`` sees it. A pure function, alike on all ranks. Raises ValueError (make_plan)."""
    index = {name: number for number, (name, _, _) in enumerate(tensors)}
    fragments = [
        Fragment(tensor=index[held.name], box=held.box, rank=number, parameter=parameter, corner=held.corner)
        for number, other in enumerate(ranks)
        for parameter, held in other.held
        if boxes.volume(held.box)
    ]
    needs = [Need(tensor=tensor, box=box, worker=worker) for worker, tensor, box in engine.needs]
    specs = _specs(tensors, fragments, needs, engine.dtypes)
    home, host = ranks[engine.leader].replica, ranks[engine.leader].host
    plan = make_plan(
        specs,
        fragments,
        needs,
        bucket_bytes=bucket_bytes,
        distance=lambda other: (ranks[other].replica != home) * 2 + (ranks[other].host != host),
    )
    own = tuple(tuple(m for m in bucket.moves if m.rank == rank) for bucket in plan.buckets)
    shared = frozenset(number for number, other in enumerate(ranks) if other.host == host)
    return Lane(leader=engine.leader, plan=plan, own=own, shared=shared)


def spans_replicas(lane: Lane, ranks: Sequence[RankShards]) -> bool:
    """Whether ranks of other replicas hold what this engine needs and its own replica lacks."""
    home = ranks[lane.leader].replica
    return any(ranks[m.rank].replica != home for bucket in lane.plan.buckets for m in bucket.moves)


def open_slots(lane: Lane, rank: int, channel: Channel | None, told: tuple[str, str | None, int]) -> None:
    """Find the leader's buffers. ``told``: its transport, where other processes find them (None: nowhere), bytes of each."""
    transport, path, num_bytes = told
    lane.on_device = transport in ON_DEVICE
    if path is None:
        lane.shared = frozenset({lane.leader})
    if rank == lane.leader:
        assert channel is not None, "got a leader without a channel"
        lane.slots = channel.outlet.slots
    elif path is not None and rank in lane.shared:
        lane.slots = map_slots(path, num_bytes)


def send_shards(
    lanes: Sequence[Lane],
    shards: LocalShards,
    channel: Channel | None,
    topology: Topology,
    pg: dist.ProcessGroup,
    clock: Phases,
    *,
    verify: bool,
    failed: ValueError | None,
) -> ValueError | None:
    """Walk all buckets of all lanes; collective over ``pg``. Fingerprints of what is sent go to ``lane.marks``.

    failed: on a leader, why its engine cannot take anything; its peers walk all the same.

    Returns what broke this leader's own lane, after everybody has walked to the end.
    """
    for lane in lanes:
        lane.marks = {}
    for bucket in range(max(len(lane.plan.buckets) for lane in lanes)):
        slot = bucket % NUM_SLOTS
        filling = [lane for lane in lanes if bucket < len(lane.plan.buckets)]
        own = next((lane for lane in filling if lane.leader == topology.rank), None)
        if channel is not None and own is not None and failed is None:
            with clock("wait for the engine"):
                try:
                    channel.free_slot()
                except ValueError as error:
                    failed = error
        with clock("wait for peers"):
            dist.barrier(pg)
        with clock("fill"):
            for lane in filling:
                _fill(lane, bucket, slot, shards, topology, verify=verify)
        with clock("wait for peers"):
            dist.barrier(pg)
        if channel is not None and own is not None and failed is None:
            channel.send(own.plan.buckets[bucket].sections)
    return failed


def expected_marks(lane: Lane, pg: dist.ProcessGroup) -> dict[str, dict[str, int]]:
    """Collective over ``pg``. On the lane's leader: by worker and tensor the fingerprint of all that was sent to it."""
    pairs = sorted({(m.worker, m.tensor) for bucket in lane.plan.buckets for m in bucket.moves})
    sums = torch.tensor([lane.marks.get(pair, 0) for pair in pairs], dtype=torch.int64)
    dist.all_reduce(sums, group=pg)  # int64 sums wrap around, as fingerprints do
    expected: dict[str, dict[str, int]] = {worker: {} for worker in lane.plan.workers}
    for (worker, tensor), mark in zip(pairs, sums.tolist(), strict=True):
        expected[worker][lane.plan.specs[tensor].name] = mark
    return expected


def _fill(lane: Lane, bucket: int, slot: int, shards: LocalShards, topology: Topology, *, verify: bool) -> None:
    """Write this rank's moves into the leader's buffer, or send them there; on the leader, take what others send."""
    rank, plan = topology.rank, lane.plan.buckets[bucket]
    pg = None if lane.on_device else topology.world_cpu_pg
    if rank in lane.shared:
        for move in lane.own[bucket]:
            _write(lane, move, lane.slots[slot][move.offset :], shards, verify=verify)
    elif lane.own[bucket]:
        regions = plan.regions[rank]
        device = topology.platform.device if lane.on_device else "cpu"
        packed = torch.empty(sum(r.num_bytes for r in regions), dtype=torch.uint8, device=device)
        start = 0
        for region in regions:
            for move in lane.own[bucket]:
                if region.offset <= move.offset < region.offset + region.num_bytes:
                    _write(lane, move, packed[start + move.offset - region.offset :], shards, verify=verify)
            start += region.num_bytes
        for part in packed.split([r.num_bytes for r in regions]):
            dist.send(part, lane.leader, group=pg)
    if rank == lane.leader:
        for source, regions in plan.regions.items():
            if source not in lane.shared:
                for region in regions:
                    dist.recv(lane.slots[slot][region.offset : region.offset + region.num_bytes], source, group=pg)


def _write(lane: Lane, move: Move, place: torch.Tensor, shards: LocalShards, *, verify: bool) -> None:
    spec = lane.plan.specs[move.tensor]
    parameter = shards.parameters[move.parameter].detach()
    source = boxes.part(parameter, boxes.whole(parameter.shape), move.inside)
    target = place[: source.numel() * spec.dtype.itemsize].view(spec.dtype).view(source.shape)
    target.copy_(source)
    if verify:
        seen = source if source.dtype == spec.dtype else target
        mark = fingerprint(seen, move.box, spec.shape, spec.word_bytes)
        pair = (move.worker, move.tensor)
        lane.marks[pair] = add(lane.marks.get(pair, 0), mark)


def _specs(
    tensors: Sequence[Sequence[Any]], fragments: Sequence[Fragment], needs: Sequence[Need], wanted: Mapping[int, str]
) -> list[TensorSpec]:
    """With the narrower of the two dtypes, and words that no cut of either side divides."""
    cuts: dict[int, set[int]] = {}
    for part in (*fragments, *needs):
        cuts.setdefault(part.tensor, set()).update(part.box[-1:][0] if part.box else ())
    specs = []
    for number, (name, shape, held) in enumerate(tensors):
        dtypes = [dtype_named(held)] + ([dtype_named(wanted[number])] if number in wanted else [])
        dtype = min(dtypes, key=lambda d: d.itemsize)
        word = word_bytes(dtype.itemsize, sorted(cuts.get(number, set()) - {0}))
        specs.append(TensorSpec(name=name, shape=tuple(shape), dtype=dtype, word_bytes=word))
    return specs


def _natural(name: str) -> list[tuple[int, str]]:
    """So that layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

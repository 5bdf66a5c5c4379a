"""Which part of which shard goes where: a pure function from the trainer's layout and the workers' needs to moves.

Both sides speak of boxes of Hugging Face tensors. A fragment is a box that lies in a parameter of some rank; a need is a box
that a worker's model takes. Every box of a need is cut along the fragments that hold it; where several ranks hold the same
fragment (replicated or tied tensors, replicas of the data) one of them sends it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_gcpo.reshard.boxes import Box, intersect, volume
from megatron_gcpo.reshard.cuts import aligned, capacity, cut
from megatron_gcpo.reshard.transport.base import Section
from megatron_gcpo.reshard.wire import Piece, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Part of a Hugging Face tensor as some rank holds it."""

    tensor: int
    """Index into the list of tensors."""
    box: Box
    rank: int
    parameter: int
    """Index into that rank's own list of parameters."""
    corner: tuple[int, ...]
    """Where the box starts within the parameter."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Part of a Hugging Face tensor that a worker's model takes."""

    tensor: int
    box: Box
    worker: str


@dataclass(frozen=True, kw_only=True)
class Move:
    """One dense copy from a parameter into a bucket."""

    tensor: int
    box: Box
    worker: str
    rank: int
    parameter: int
    inside: Box
    """Of the parameter."""
    offset: int = 0
    """Bytes from the start of the bucket."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """What travels together. The moves of a worker lie together, and among them those of a rank."""

    moves: tuple[Move, ...]
    sections: Mapping[str, Section]
    """By worker."""
    regions: Mapping[int, tuple[Section, ...]]
    """By rank: what it writes, one section for every worker that gets something of it."""

    @property
    def num_bytes(self) -> int:
        return max(section.offset + section.num_bytes for section in self.sections.values())


@dataclass(frozen=True, kw_only=True)
class Plan:
    specs: tuple[TensorSpec, ...]
    workers: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    minimal_bytes: int
    """What the workers need, all together."""

    @property
    def num_bytes(self) -> int:
        """What the buckets carry."""
        return sum(volume(m.box) * self.specs[m.tensor].dtype.itemsize for b in self.buckets for m in b.moves)

    def pieces(self, worker: str) -> list[list[Piece]]:
        """What a worker finds in its section of each bucket."""
        totals: dict[int, int] = defaultdict(int)
        for move in self._moves_to(worker):
            totals[move.tensor] += volume(move.box)
        return [
            [
                Piece(
                    tensor=move.tensor,
                    box=move.box,
                    offset=move.offset - bucket.sections[worker].offset,
                    of_elements=totals[move.tensor],
                )
                for move in bucket.moves
                if move.worker == worker
            ]
            for bucket in self.buckets
        ]

    def _moves_to(self, worker: str) -> Iterable[Move]:
        return (move for bucket in self.buckets for move in bucket.moves if move.worker == worker)


def make_plan(
    specs: Sequence[TensorSpec],
    fragments: Iterable[Fragment],
    needs: Iterable[Need],
    *,
    bucket_bytes: int,
    distance: Callable[[int], int] = lambda rank: 0,
) -> Plan:
    """The plan that moves every needed element once.

    Args:
        specs: the tensors; order is the order of travel.
        fragments, needs: of all ranks and workers of one engine; needs may repeat.
        distance: of a rank from the engine; of several ranks with the same fragment one of the nearest sends it, by turns.

    Raises:
        ValueError: fragments overlap without being equal or leave something out, needs overlap without being equal or
            leave something out, by the name of the tensor.
    """
    holders = _holders(specs, list(fragments), distance)
    wanted = _wanted(specs, list(needs))
    load: dict[int, int] = defaultdict(int)
    moves: list[list[Move]] = []
    for tensor, by_worker in enumerate(wanted):
        of_tensor = []
        for worker, boxes in by_worker.items():
            for box, (held, ranks) in itertools.product(boxes, holders[tensor].items()):
                common = intersect(box, held)
                if common is None:
                    continue
                source = min(ranks, key=lambda fragment: (load[fragment.rank], fragment.rank))
                load[source.rank] += volume(common) * specs[tensor].dtype.itemsize
                of_tensor.append(_move(common, source, worker))
        moves.append(of_tensor)
    minimal = sum(
        volume(box) * specs[tensor].dtype.itemsize
        for tensor, by_worker in enumerate(wanted)
        for boxes in by_worker.values()
        for box in boxes
    )
    workers = tuple(sorted({worker for by_worker in wanted for worker in by_worker}))
    plan = Plan(
        specs=tuple(specs), workers=workers, buckets=_packed(specs, moves, workers, bucket_bytes), minimal_bytes=minimal
    )
    assert plan.num_bytes == minimal, f"got moves of {plan.num_bytes} bytes, expected the {minimal} needed"
    return plan


def _move(box: Box, source: Fragment, worker: str) -> Move:
    inside = tuple(
        (corner + start - first, corner + stop - first)
        for corner, (start, stop), (first, _) in zip(source.corner, box, source.box, strict=True)
    )
    return Move(
        tensor=source.tensor, box=box, worker=worker, rank=source.rank, parameter=source.parameter, inside=inside
    )


def _holders(
    specs: Sequence[TensorSpec], fragments: Sequence[Fragment], distance: Callable[[int], int]
) -> list[dict[Box, list[Fragment]]]:
    """Per tensor: each box that ranks hold, with the nearest of its holders. The boxes tile the tensor."""
    holders: list[dict[Box, list[Fragment]]] = [{} for _ in specs]
    for fragment in fragments:
        holders[fragment.tensor].setdefault(fragment.box, []).append(fragment)
    for spec, by_box in zip(specs, holders, strict=True):
        _require_tiling(spec, list(by_box), "of the trainer's ranks", "nobody holds")
        for box, held in by_box.items():
            nearest = min(distance(f.rank) for f in held)
            by_box[box] = [f for f in held if distance(f.rank) == nearest]
    return holders


def _wanted(specs: Sequence[TensorSpec], needs: Sequence[Need]) -> list[dict[str, list[Box]]]:
    """Per tensor and worker: the boxes it takes, each once. Together the workers take all of the tensor."""
    wanted: list[dict[str, dict[Box, None]]] = [{} for _ in specs]
    for need in needs:
        wanted[need.tensor].setdefault(need.worker, {})[need.box] = None
    for spec, by_worker in zip(specs, wanted, strict=True):
        for worker, boxes in by_worker.items():
            _require_disjoint(spec, list(boxes), f"that worker {worker} takes")
        taken = {box for boxes in by_worker.values() for box in boxes}
        if _covered(taken) != _elements(spec):
            raise ValueError(
                f"the engine takes {_covered(taken)} of the {_elements(spec)} elements of {spec.name!r}: it is another "
                "model than the one that is trained"
            )
    return [{worker: list(boxes) for worker, boxes in by_worker.items()} for by_worker in wanted]


def _elements(spec: TensorSpec) -> int:
    return volume(tuple((0, size) for size in spec.shape))


def _require_tiling(spec: TensorSpec, boxes: Sequence[Box], whose: str, nobody: str) -> None:
    _require_disjoint(spec, boxes, whose)
    total = sum(volume(box) for box in boxes)
    if total != _elements(spec):
        raise ValueError(f"{nobody} {_elements(spec) - total} of the {_elements(spec)} elements of {spec.name!r}")


def _require_disjoint(spec: TensorSpec, boxes: Sequence[Box], whose: str) -> None:
    for index, box in enumerate(boxes):
        if any(intersect(box, other) is not None for other in boxes[:index]):
            raise ValueError(f"parts {whose} overlap in {spec.name!r}")


def _covered(boxes: Iterable[Box]) -> int:
    """Elements in the union: boxes are cut along each other's sides until equal or apart."""
    boxes = list(boxes)
    if not boxes:
        return 0
    sides = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(boxes[0]))]
    cells: set[Box] = set()
    for box in boxes:
        spans = [
            list(itertools.pairwise(edge for edge in edges if start <= edge <= stop))
            for edges, (start, stop) in zip(sides, box, strict=True)
        ]
        cells.update(itertools.product(*spans))
    return sum(volume(cell) for cell in cells)


def _packed(
    specs: Sequence[TensorSpec], moves: Sequence[Sequence[Move]], workers: Sequence[str], bucket_bytes: int
) -> tuple[Bucket, ...]:
    """All moves, in order, in buckets of at most this size."""
    room = capacity(bucket_bytes)
    buckets: list[list[Move]] = [[]]
    used = 0
    for move in itertools.chain.from_iterable(moves):
        itemsize = specs[move.tensor].dtype.itemsize
        for part in _parts(move, room // itemsize):
            size = aligned(volume(part.box) * itemsize)
            if used + size > room and buckets[-1]:
                buckets.append([])
                used = 0
            buckets[-1].append(part)
            used += size
    return tuple(_laid_out(specs, bucket, workers) for bucket in buckets if bucket)


def _laid_out(specs: Sequence[TensorSpec], moves: Sequence[Move], workers: Sequence[str]) -> Bucket:
    """The moves with their places: sorted by worker, then by rank."""
    placed: list[Move] = []
    sections = dict.fromkeys(workers, Section(0, 0))
    regions: dict[int, list[Section]] = {}
    offset = 0
    ordered = sorted(moves, key=lambda m: (m.worker, m.rank))
    for worker, of_worker in itertools.groupby(ordered, key=lambda m: m.worker):
        first = offset
        for rank, of_rank in itertools.groupby(of_worker, key=lambda m: m.rank):
            start = offset
            for move in of_rank:
                placed.append(replace(move, offset=offset))
                offset = aligned(offset + volume(move.box) * specs[move.tensor].dtype.itemsize)
            regions.setdefault(rank, []).append(Section(start, offset - start))
        sections[worker] = Section(first, offset - first)
    by_rank = {rank: tuple(own) for rank, own in regions.items()}
    return Bucket(moves=tuple(placed), sections=sections, regions=by_rank)


def _parts(move: Move, max_elements: int) -> Iterable[Move]:
    """The move, cut so that each part fits into a bucket."""
    for box in cut(move.box, max_elements):
        inside = tuple(
            (first + start - origin, first + stop - origin)
            for (first, _), (start, stop), (origin, _) in zip(move.inside, box, move.box, strict=True)
        )
        yield replace(move, box=box, inside=inside)

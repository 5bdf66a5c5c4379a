"""Plans over random grids: executed on real arrays, every worker gets exactly what it needs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.reshard.boxes import intersect, part, sizes, volume, whole
from megatron_gcpo.reshard.cuts import cut
from megatron_gcpo.reshard.plan import Fragment, Need, Plan, make_plan
from megatron_gcpo.reshard.source import Held, column_share, qkv_share, row_share
from megatron_gcpo.reshard.wire import TensorSpec


@dataclass
class World:
    """A model on both sides: Hugging Face tensors of distinct numbers, trainer ranks, workers."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    fragments: list[tuple[str, Fragment]] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)

    def add(self, name: str, *shape: int) -> torch.Tensor:
        first = sum(t.numel() for t in self.tensors.values())
        self.tensors[name] = torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.int32).view(shape)
        return self.tensors[name]

    def hold(self, rank: int, parameter: torch.Tensor, *held: Held) -> None:
        own = self.parameters.setdefault(rank, [])
        for there in held:
            assert there.shape == tuple(self.tensors[there.name].shape)
            if volume(there.box):
                index = list(self.tensors).index(there.name)
                fragment = Fragment(tensor=index, box=there.box, rank=rank, parameter=len(own), corner=there.corner)
                self.fragments.append((there.name, fragment))
        own.append(parameter)

    def need(self, worker: int, name: str, *box: tuple[int, int]) -> None:
        index = list(self.tensors).index(name)
        full = whole(self.tensors[name].shape)
        self.needs.append(Need(tensor=index, box=(*box, *full[len(box) :]), worker=f"worker{worker}"))

    @property
    def specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(name=name, shape=tuple(t.shape), dtype=t.dtype, word_bytes=4) for name, t in self.tensors.items()
        ]

    def plan(self, bucket_bytes: int, **options: Any) -> Plan:
        return make_plan(self.specs, [f for _, f in self.fragments], self.needs, bucket_bytes=bucket_bytes, **options)

    def execute(self, plan: Plan) -> dict[tuple[str, str], torch.Tensor]:
        """(worker, tensor) -> a full tensor in which only what arrived is not -1."""
        arrived: dict[tuple[str, str], torch.Tensor] = {}
        written: dict[tuple[str, str], torch.Tensor] = {}
        pieces = {worker: plan.pieces(worker) for worker in plan.workers}
        for number, bucket in enumerate(plan.buckets):
            raw = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            for move in bucket.moves:
                parameter = self.parameters[move.rank][move.parameter]
                source = part(parameter, whole(parameter.shape), move.inside).contiguous()
                raw[move.offset : move.offset + source.nbytes] = source.view(-1).view(torch.uint8)
                assert any(r.offset <= move.offset < r.offset + r.num_bytes for r in bucket.regions[move.rank])
            for worker in plan.workers:
                offset, num_bytes = bucket.sections[worker]
                section = raw[offset : offset + num_bytes]
                for piece in pieces[worker][number]:
                    spec = plan.specs[piece.tensor]
                    key = (worker, spec.name)
                    target = arrived.setdefault(key, torch.full(spec.shape, -1, dtype=spec.dtype))
                    count = written.setdefault(key, torch.zeros(spec.shape, dtype=torch.int32))
                    data = section[piece.offset : piece.offset + piece.num_bytes(spec)].clone()
                    part(target, whole(spec.shape), piece.box).copy_(data.view(spec.dtype).view(sizes(piece.box)))
                    part(count, whole(spec.shape), piece.box).add_(1)
        assert all(count.max() <= 1 for count in written.values()), "an element was written twice"
        return arrived


def megatron_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """Rows grouped by KV head, as Megatron has them, written out plainly."""
    rows = []
    for group in range(groups):
        rows += [x.chunk(groups)[group] for x in (q, k, v)]
    return torch.cat(rows)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Dense and expert layers on TP x PP x EP (x ETP) ranks, and TP workers with fewer KV heads than some of them."""
    tp, pp, ep, etp, target = (draw(st.sampled_from([1, 2, 4, 8])) for _ in range(5))
    pp, ep, etp = min(pp, 4), min(ep, 4), min(etp, 2)
    groups = draw(st.sampled_from([1, 2, 4, 8]))
    per_group, head, hidden = draw(st.sampled_from([1, 2, 3])), 8, 16
    vocab = draw(st.integers(1, 40))
    world = World()
    heads = groups * per_group
    config = SimpleNamespace(num_attention_heads=heads, num_query_groups=groups, kv_channels=head, hidden_size=hidden)
    for rank in range(pp * tp):
        world.parameters[rank] = []
    _add_vocabulary(world, vocab, hidden, tp, pp, target)
    for layer in range(draw(st.integers(1, 3))):
        stage = layer % pp
        _add_attention(world, layer, config, tp, stage, target)
        _add_dense(world, layer, hidden, tp, stage, target)
        _add_experts(world, layer, hidden, ep, etp, target)
    return world


def _add_vocabulary(world: World, vocab: int, hidden: int, tp: int, pp: int, target: int) -> None:
    """Padded rows; a copy on the last stage, as tied models have it."""
    table = world.add("embed", vocab, hidden)
    rows = -(-vocab // tp)
    padded = torch.cat([table, torch.full((rows * tp - vocab, hidden), -7, dtype=torch.int32)])
    for stage, rank in itertools.product({0, pp - 1}, range(tp)):
        held = row_share("embed", (rows, hidden), rank, tp, true_rows=vocab)
        world.hold(stage * tp + rank, padded[rank * rows : (rank + 1) * rows], held)
    share = -(-vocab // target)
    for worker in range(target):
        if worker * share < vocab:
            world.need(worker, "embed", (worker * share, min(vocab, (worker + 1) * share)))


def _add_attention(world: World, layer: int, config: Any, tp: int, stage: int, target: int) -> None:
    head, groups, heads = config.kv_channels, config.num_query_groups, config.num_attention_heads
    names = {key: f"{layer}.{key}" for key in "qkv"}
    q, k, v = (
        world.add(names[key], n * head, config.hidden_size)
        for key, n in zip("qkv", (heads, groups, groups), strict=True)
    )
    packed = megatron_qkv(q, k, v, groups)
    rows = len(packed) // tp
    for rank in range(tp):
        held = qkv_share(names, (rows, config.hidden_size), rank, tp, config)
        world.hold(stage * tp + rank, packed[rank * rows : (rank + 1) * rows], *held)
    norm = world.add(f"{layer}.norm", head)
    for rank in range(tp):
        whole_norm = Held(name=f"{layer}.norm", shape=(head,), box=((0, head),), corner=(0,))
        world.hold(stage * tp + rank, norm.clone(), whole_norm)
    for worker in range(target):
        world.need(worker, f"{layer}.norm")
        width = heads * head // target
        world.need(worker, names["q"], (worker * width, (worker + 1) * width))
        copies = max(1, target // groups)  # of a KV head, where there are fewer of them than workers
        width = groups * head * copies // target
        for key in "kv":
            world.need(worker, names[key], (worker // copies * width, (worker // copies + 1) * width))


def _add_dense(world: World, layer: int, hidden: int, tp: int, stage: int, target: int) -> None:
    inner = 16
    gate, up, down = (
        world.add(f"{layer}.{name}", *shape)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner)))
    )
    half = inner // tp
    for rank in range(tp):
        joined = torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
        held = [
            row_share(f"{layer}.{name}", (half, hidden), rank, tp, corner=half * i)
            for i, name in enumerate(("gate", "up"))
        ]
        world.hold(stage * tp + rank, joined, *held)
        held = [column_share(f"{layer}.down", (hidden, half), rank, tp)]
        world.hold(stage * tp + rank, down.chunk(tp, 1)[rank].contiguous(), *held)
    share = inner // target
    for worker in range(target):
        for name in ("gate", "up"):
            world.need(worker, f"{layer}.{name}", (worker * share, (worker + 1) * share))
        world.need(worker, f"{layer}.down", (0, hidden), (worker * share, (worker + 1) * share))


def _add_experts(world: World, layer: int, hidden: int, ep: int, etp: int, target: int) -> None:
    """Expert weights lie on ranks of their own numbering; two replicas hold the same."""
    inner = 16
    for expert in range(4):
        name = f"{layer}.expert{expert}.down"
        down = world.add(name, hidden, inner)
        owner = expert * ep // 4
        for rank, replica in itertools.product(range(etp), range(2)):
            held = column_share(name, (hidden, inner // etp), rank, etp)
            place = replica * 8 + owner * etp + rank
            world.hold(place, down.chunk(etp, 1)[rank].contiguous(), held)
        for worker in range(target):
            share = inner // target
            world.need(worker, name, (0, hidden), (worker * share, (worker + 1) * share))


@given(worlds(), st.sampled_from([64, 200, 1000, 1 << 20]))
def test_every_worker_gets_what_it_needs_and_nothing_else(world: World, bucket_bytes: int) -> None:
    plan = world.plan(bucket_bytes)
    arrived = world.execute(plan)
    wanted: dict[tuple[str, str], torch.Tensor] = {}
    names = list(world.tensors)
    for need in world.needs:
        full = world.tensors[names[need.tensor]]
        target = wanted.setdefault((need.worker, names[need.tensor]), torch.full_like(full, -1))
        part(target, whole(full.shape), need.box).copy_(part(full, whole(full.shape), need.box))
    assert arrived.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(arrived[key], tensor), key
    assert plan.num_bytes == plan.minimal_bytes == sum(4 * int((t >= 0).sum()) for t in wanted.values())
    assert all(bucket.num_bytes <= bucket_bytes for bucket in plan.buckets)


@given(worlds(), st.data())
def test_a_fragment_that_is_gone_is_named(world: World, data: st.DataObject) -> None:
    name, gone = data.draw(st.sampled_from(world.fragments))
    world.fragments = [(n, f) for n, f in world.fragments if (f.tensor, f.box) != (gone.tensor, gone.box)]
    with pytest.raises(ValueError, match=rf"nobody holds {volume(gone.box)} of .* '{name}'"):
        world.plan(1000)


@given(worlds(), st.data())
def test_a_tensor_that_no_worker_takes_whole_is_named(world: World, data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(world.needs))
    world.needs = [n for n in world.needs if n.tensor != gone.tensor or intersect(n.box, gone.box) is None]
    with pytest.raises(ValueError, match=f"elements of '{list(world.tensors)[gone.tensor]}': it is another model"):
        world.plan(1000)


def small() -> World:
    world = World()
    table = world.add("w", 8, 4)
    for rank in range(4):
        held = row_share("w", (4, 4), rank % 2, 2)
        world.hold(rank, table.chunk(2)[rank % 2], held)
    world.need(0, "w")
    return world


def test_overlaps_are_refused() -> None:
    world = small()
    extra = replace(world.fragments[0][1], box=((0, 3), (0, 4)))
    world.fragments.append(("w", extra))
    with pytest.raises(ValueError, match="parts of the trainer's ranks overlap in 'w'"):
        world.plan(1000)
    world = small()
    world.need(0, "w", (2, 5))
    with pytest.raises(ValueError, match="parts that worker worker0 takes overlap in 'w'"):
        world.plan(1000)


def test_a_need_that_repeats_is_sent_once() -> None:
    world = small()
    world.need(0, "w")
    assert world.plan(1000).num_bytes == 8 * 4 * 4


def test_of_equal_holders_the_nearest_send_by_turns() -> None:
    world = small()
    for worker in range(1, 3):
        world.need(worker, "w")
    ranks = [m.rank for bucket in world.plan(10_000).buckets for m in bucket.moves]
    assert {r: ranks.count(r) for r in ranks} == {0: 2, 2: 1, 1: 2, 3: 1}
    near = world.plan(10_000, distance=lambda rank: 0 if rank in (2, 3) else 1)
    assert {m.rank for bucket in near.buckets for m in bucket.moves} == {2, 3}


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(1, 40))
def test_cutting_tiles_a_box(shape: list[int], limit: int) -> None:
    box = whole(shape)
    count = torch.zeros(shape, dtype=torch.int32)
    for piece in cut(box, limit):
        assert volume(piece) <= limit
        part(count, box, piece).add_(1)
    assert bool((count == 1).all())


def test_a_row_longer_than_a_bucket_is_cut_between_words() -> None:
    cuts = list(cut(((3, 4), (16, 1017)), 100))
    assert all((start - 16) % 8 == 0 for _, (start, _) in cuts)
    assert max(map(volume, cuts)) == 96

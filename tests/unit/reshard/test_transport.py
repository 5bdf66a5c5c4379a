"""Every transport that a CPU has: sections arrive where they belong, bucket by bucket, and an end that is gone is noticed."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_gcpo.reshard.transport import Section, make_outlet, open_inlet, shm
from megatron_gcpo.reshard.transport.table import choose

WORKERS = ("a", "b", "c")
CPU = torch.device("cpu")
BUCKET = 4096


def outlet_of(kind: str, folder: Path, timeout_s: float = 20.0) -> Any:
    return make_outlet(kind, BUCKET, WORKERS, device=CPU, folder=folder / "push", loopback=True, timeout_s=timeout_s)


def together(*jobs: Any) -> list[Any]:
    """Results of jobs that wait for each other."""
    results: list[Any] = [None] * len(jobs)

    def run(index: int) -> None:
        results[index] = jobs[index]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def sections(number: int) -> dict[str, Section]:
    """Of different sizes; one worker gets nothing, and two get the same."""
    return {"a": Section(0, 1000 + number), "b": Section(0, 1000 + number), "c": Section(2000, 0)}


@pytest.mark.parametrize("kind", ["direct", "shm", "gloo", "file"])
def test_sections_arrive_in_alternating_buckets(kind: str, tmp_path: Path) -> None:
    outlet = outlet_of(kind, tmp_path)
    _, *inlets = together(outlet.connect, *(lambda w=w: open_inlet(kind, outlet.init_info(), w, CPU) for w in WORKERS))
    outlet.connected()
    for number in range(5):
        slot = number % 2
        outlet.slots[slot].copy_(torch.randint(0, 256, (BUCKET,), dtype=torch.uint8))
        message = outlet.message(slot, sections(number))
        _, a, b, c = together(
            lambda s=slot, n=number: outlet.send(s, sections(n)),
            *(lambda i=i, m=message: i.receive(m).clone() for i in inlets),
        )
        assert torch.equal(a, outlet.slots[slot][: 1000 + number])
        assert torch.equal(b, a)
        assert len(c) == 0
    for inlet in inlets:
        inlet.close()
    outlet.close()
    assert not list((tmp_path / "push").glob("*")) if kind == "file" else True


def test_shared_memory_leaves_nothing_behind_even_when_nobody_closes_it(tmp_path: Path) -> None:
    outlet = outlet_of("shm", tmp_path)
    inlet = open_inlet("shm", outlet.init_info(), "a", CPU)
    outlet.connected()
    assert not Path(outlet.shared_path).exists()
    outlet.slots[1][5] = 77
    assert int(inlet.receive({"slot": 1, "sections": {"a": [5, 1]}})[0]) == 77
    with pytest.raises(ValueError, match=r"on another machine.*rollout\.push\.transport"):
        open_inlet("shm", outlet.init_info(), "b", CPU)


def test_buckets_that_shared_memory_cannot_hold_are_refused(tmp_path: Path) -> None:
    assert shm.fits(1 << 20)
    assert not shm.fits(1 << 50)
    with pytest.raises(ValueError, match=r"no room.*rollout\.push\.bucket_bytes"):
        make_outlet("shm", 1 << 50, WORKERS, device=CPU, folder=tmp_path, loopback=True, timeout_s=1.0)


def _pusher_that_dies(pipe: Any, folder: Path) -> None:
    outlet = make_outlet("gloo", BUCKET, ("a",), device=CPU, folder=folder, loopback=True, timeout_s=20.0)
    pipe.send(outlet.init_info())
    outlet.connect()
    outlet.slots[0].fill_(3)
    outlet.send(0, {"a": Section(0, 10)})
    pipe.recv()
    os._exit(9)


def test_a_pusher_that_is_killed_does_not_leave_its_workers_waiting(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    pusher = context.Process(target=_pusher_that_dies, args=(theirs, tmp_path), daemon=True)
    pusher.start()
    inlet = open_inlet("gloo", ours.recv(), "a", CPU)
    assert inlet.receive({"sections": {"a": [0, 10]}}).tolist() == [3] * 10
    ours.send("now")
    with pytest.raises(ValueError, match="the pusher went away"):
        inlet.receive({"sections": {"a": [0, 10]}})
    pusher.join()


def test_a_pusher_that_stalls_is_given_up(tmp_path: Path) -> None:
    outlet = outlet_of("gloo", tmp_path, timeout_s=1.0)
    _, *inlets = together(
        outlet.connect, *(lambda w=w: open_inlet("gloo", outlet.init_info(), w, CPU) for w in WORKERS)
    )
    with pytest.raises(ValueError, match="the pusher went away"):
        inlets[0].receive({"sections": {"a": [0, 10]}})


AUTO: list[tuple[dict[str, Any], str]] = [
    ({"in_process": True, "alone": True}, "direct"),
    ({"in_process": True, "alone": False}, "shm"),
    ({"in_process": True, "alone": False, "shares_memory": False}, "gloo"),
    ({}, "shm"),
    ({"shares_memory": False}, "gloo"),
    ({"own_gpu": "g0", "gpus": ["g0"], "in_process": True, "alone": False}, "direct"),
    ({"own_gpu": "g0", "gpus": ["g0"]}, "ipc"),
    ({"own_gpu": "g0", "gpus": ["g0", "g1"]}, "shm"),
    ({"own_gpu": "g0", "gpus": ["g2", "g3"]}, "nccl"),
    ({"own_gpu": "g0", "gpus": ["g2", "g3"], "shares_memory": False}, "nccl"),
]


@pytest.mark.parametrize(("place", "kind"), AUTO)
def test_what_auto_stands_for(place: dict[str, Any], kind: str) -> None:
    default = {"in_process": False, "alone": True, "shares_memory": True, "gpus": [None], "own_gpu": None}
    assert choose(**{**default, **place}) == kind

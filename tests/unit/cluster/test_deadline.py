"""Deadlines, with ranks played by threads around a real store."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_gcpo.cluster.deadline import PeerLost, Watch, is_collective_error

TIMEOUT_S = 2.0


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False)


def play(store: dist.Store, works: list[Callable[[Watch], None]], timeout_s: float = TIMEOUT_S):
    """Run one rank per work; returns what each raised, and what the threads wanted to end it with."""
    raised: list[BaseException | None] = [None] * len(works)
    lost: list[list[str]] = [[] for _ in works]

    def run(rank: int) -> None:
        try:
            with Watch(store.clone(), rank, len(works), timeout_s, on_lost=lost[rank].append) as watch:
                works[rank](watch)
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return raised, lost


def test_barriers_hold_everybody_back_until_the_last_has_come(store):
    trace: list[tuple[int, int]] = []

    def work(rank: int, watch: Watch) -> None:
        for step in range(5):
            time.sleep(0.003 * ((rank + step) % 3))
            trace.append((step, rank))
            watch.barrier("update")

    raised, lost = play(store, [lambda w, r=r: work(r, w) for r in range(3)], timeout_s=60)
    assert raised == [None] * 3
    assert lost == [[], [], []]
    assert [step for step, _ in trace] == sorted(step for step, _ in trace)
    # Keys of finished barriers do not pile up over a long run.
    assert not store.check(["watch/barrier/1"])
    assert not store.check(["watch/barrier/4/done"])


def test_a_late_rank_is_named_with_its_phase(store):
    late_may_end = threading.Event()

    def early(watch: Watch) -> None:
        watch.barrier("start of step")
        try:
            watch.barrier("update")
        finally:
            late_may_end.set()

    def late(watch: Watch) -> None:
        watch.barrier("start of step")
        with watch.phase("generate"):
            late_may_end.wait(20)

    raised, _ = play(store, [early, early, late])
    first = next(str(error) for error in raised[:2] if "waited" in str(error))
    assert "waited 2 s before update for rank 2 (last in generate)" in first
    assert "rank 0 (last" not in first
    assert "rank 1 (last" not in first
    # The late one learns why the run is over.
    assert isinstance(raised[2], PeerLost)
    assert "before update for rank 2" in str(raised[2])


def test_a_failure_ends_the_others_with_its_reason(store):
    def fails(watch: Watch) -> None:
        store.wait(["watch/barrier/1"])
        with watch.phase("verify"):
            raise ValueError("the verifier pool is empty: set verify.num_workers")

    raised, _ = play(store, [lambda w: w.barrier("update"), fails])
    assert isinstance(raised[1], ValueError)
    assert isinstance(raised[0], PeerLost)
    assert str(raised[0]) == (
        "rank 0 ends in update: rank 1 failed in verify: the verifier pool is empty: set verify.num_workers"
    )


def killed(store: dist.Store, rank: int, world_size: int, phase: str) -> None:
    """What a rank leaves behind that is killed in this phase: its signs of life stop."""
    watch = Watch(store.clone(), rank, world_size, TIMEOUT_S).__enter__()
    watch._enter_phase(phase)
    watch._closing.set()
    watch._thread.join()


def test_a_silent_rank_ends_one_that_hangs_where_no_exception_reaches(store):
    """Rank 0 hangs, so that its thread must end it; in a process that means the whole process."""
    killed(store, 1, 2, "generate")
    freed = threading.Event()
    ended: list[str] = []

    def hang(watch: Watch) -> None:
        watch._enter_phase("update")
        assert freed.wait(20), "nobody ended the hanging rank"

    def end(reason: str) -> None:
        ended.append(reason)
        freed.set()

    def rank0() -> None:
        with Watch(store.clone(), 0, 2, TIMEOUT_S, on_lost=end) as watch:
            hang(watch)

    # Freed from its hang it goes on to the last barrier, which is closed.
    with pytest.raises(PeerLost, match="rank 0 ends in finish: rank 1"):
        rank0()
    assert ended == ["rank 1 (last in generate) died or was killed; noticed by rank 0 in update"]


def fail_in_phase(store: dist.Store, world_size: int, error: Exception) -> None:
    with Watch(store.clone(), 0, world_size, TIMEOUT_S, on_lost=lambda reason: None) as watch, watch.phase("update"):
        raise error


def test_a_failed_collective_names_the_dead(store):
    killed(store, 1, 2, "embed")
    closed = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer")
    with pytest.raises(PeerLost, match=r"rank 1 \(last in embed\) died or was killed; noticed by rank 0 in update"):
        fail_in_phase(store, 2, closed)


def test_other_errors_pass_through_a_phase_untouched(store):
    with pytest.raises(RuntimeError, match="shape mismatch") as error:
        fail_in_phase(store, 1, RuntimeError("shape mismatch"))
    assert type(error.value) is RuntimeError


def test_only_errors_of_torch_distributed_are_collective_errors():
    assert is_collective_error(dist.DistBackendError("NCCL error"))
    assert is_collective_error(
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:1] Timed out waiting 5000ms")
    )
    assert not is_collective_error(RuntimeError("timeout of the judge"))
    assert not is_collective_error(ValueError("gloo/"))

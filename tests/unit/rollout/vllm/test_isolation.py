"""What starts inside a trainer's process leaves its process groups, random numbers and console as they were."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megatron_gcpo.rollout.vllm.isolation import _TorchWithOwnGenerator, kept_globals, own_process_groups


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Path]:
    """A world of one rank, as a trainer's."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "world"), 1), rank=0, world_size=1)
    yield tmp_path
    if dist.is_initialized():
        dist.destroy_process_group()


def works(group: dist.ProcessGroup | None) -> bool:
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    return one.item() == 1


def test_a_second_world_comes_and_goes_beside_the_trainers_again_and_again(trainer: Path) -> None:
    world, count = dist.group.WORLD, c10d._world.group_count
    inner = []
    for n in range(3):
        with own_process_groups():
            assert not dist.is_initialized()
            store = dist.FileStore(str(trainer / f"inner{n}"), 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            inner.append(dist.new_group([0]))
            assert works(None)
            assert dist.group.WORLD is not world
        assert dist.group.WORLD is world
        assert c10d._world.group_count == count, "ranks that host no engine count on from here"
    groups = [*inner, dist.new_group([0]), None]
    assert all(works(group) for group in groups)
    names = [c10d._world.pg_names[group] for group in groups[:-1]]
    assert len(set(names)) == len(names)


def test_ending_in_it_spares_the_trainers_default_group(trainer: Path) -> None:
    with own_process_groups():
        store = dist.FileStore(str(trainer / "inner"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        group = dist.new_group([0])
    with own_process_groups():
        dist.destroy_process_group(group)
        assert not dist.is_initialized(), "what ends the default group when there is one finds none"
    assert works(None)


def test_the_worlds_are_the_trainers_after_a_failure_too(trainer: Path) -> None:
    world, count = dist.group.WORLD, c10d._world.group_count
    with pytest.raises(RuntimeError, match="inside"), own_process_groups():
        raise RuntimeError("inside")
    assert (dist.group.WORLD, c10d._world.group_count) == (world, count)


def test_random_numbers_and_settings_are_kept() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    threads, dtype = torch.set_num_threads, torch.get_default_dtype()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    with kept_globals():
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        torch.set_default_dtype(torch.bfloat16)
        torch.set_num_threads = lambda n: None
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    assert (torch.set_num_threads, torch.get_default_dtype()) == (threads, dtype)


def test_randint_leaves_the_global_generator_alone_and_obeys_a_given_one() -> None:
    stand_in, before = _TorchWithOwnGenerator("torch"), torch.get_rng_state()
    own = [stand_in.randint(0, 1000, (4,)) for _ in range(2)]
    assert not torch.equal(*own)
    given = [stand_in.randint(0, 1000, (4,), generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*given)
    assert torch.equal(torch.get_rng_state(), before)
    assert stand_in.long is torch.long


NOISE = """
import os, sys, warnings
from megatron_gcpo.rollout.vllm.isolation import quiet_start
with quiet_start():
    os.write(2, b"from C++\\n"); print("from Python", file=sys.stderr); warnings.warn("a warning")
print("after", file=sys.stderr)
with quiet_start():
    os.write(2, b"the reason\\n")
    raise SystemExit("failed")
"""


def test_a_start_is_quiet_unless_it_fails() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", NOISE], capture_output=True, text=True, env={**os.environ}, timeout=120
    )
    lines = ended.stderr.splitlines()
    assert lines == ["after", "the reason", "failed"]

"""Checkpoints of a run: model, optimizer, schedule and random states by Megatron's dist_checkpointing, plus JSON-able state.

A checkpoint is a folder ``<run>/checkpoints/step_00000050``. It is written under a name ending in ``.partial``; its manifest
comes last, then the folder takes its final name. So whatever is killed when, a folder with a final name is whole.
Tensors are stored in the model's own shapes, so that another layout (TP, PP, VPP, EP, DP) can read them. Of a policy with
adapters only those are stored, and what identifies the frozen weights below them.
"""

from __future__ import annotations

import errno
import logging
import queue
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.policy import adam
from megatron_gcpo.policy import manifest as manifests
from megatron_gcpo.policy.actor import Actor
from megatron_gcpo.policy.weights import SHARDING, adapters_alone, model_state, put_weights

log = logging.getLogger(__name__)


def save(run_dir: str | Path, actor: Actor, extra_state: Mapping[str, Any], step: int, keep_last: int) -> Path:
    """Write the checkpoint of ``step`` and remove all but the newest ``keep_last``. Collective over all ranks.

    extra_state: JSON-able; that of rank 0 is stored.

    Raises ValueError when the disk is full or cannot be written; older checkpoints are untouched and nothing torn remains.
    """
    topology = actor.topology
    target = manifests.folder(run_dir, step)
    partial = target.with_name(target.name + manifests.PARTIAL)
    state = _state(actor, loading=False)
    problem = _on_rank_zero(topology, lambda: _prepare(partial, run_dir), "prepare the folder")
    problem = problem or _lack_of_space(topology, state, partial)
    if problem is None:
        problem = _write(partial, state, topology)
    if problem is None:
        problem = _on_rank_zero(
            topology, lambda: _complete(actor, partial, target, extra_state, step), "finish the checkpoint"
        )
    if problem is not None:
        _on_rank_zero(topology, lambda: manifests.remove(partial), "remove what was written")
        raise ValueError(f"checkpoint of step {step} was not written: {problem}")
    _on_rank_zero(topology, lambda: manifests.prune(run_dir, keep_last), "remove old checkpoints")
    return target


def load(path: str | Path, actor: Actor) -> dict[str, Any]:
    """Put the actor in the state it was saved in, and return the extra state. Collective over all ranks.

    On the layout that saved it the actor goes on bit for bit; on another one with the same weights and optimizer state,
    and fresh random states.

    Raises ValueError when the folder is torn or holds another model, naming what differs.
    """
    path = Path(path)
    manifest = manifests.read(path)
    manifests.check_model(manifest, actor.policy.hf_config, path)
    if manifest.dtype != manifests.dtype_name(actor.policy.dtype):
        raise ValueError(f"checkpoint {path} was trained with model.dtype={manifest.dtype}: set that to resume it")
    adapters = actor.policy.adapters
    manifests.check_lora(manifest, None if adapters is None else adapters.config, path)
    if adapters is not None:
        manifests.check_base(manifest, adapters.base, path)
    same_layout = manifest.layout == manifests.layout(actor.topology, actor.policy)
    state = _state(actor, loading=True, random_states=same_layout)
    loaded: Any = dist_checkpointing.load(state, str(path))
    put_weights(actor.policy, loaded)
    adam.load(actor.optimizer, loaded["optimizer"])
    actor.scheduler.load_state_dict(loaded["scheduler"])
    actor.num_updates, actor.num_skipped = loaded["counts"]
    if same_layout:
        _set_random_states(loaded["random"][0])
    elif dist.get_rank() == 0:
        log.warning(
            "%s was saved on %s: weights and optimizer are taken, random states are fresh", path, manifest.layout
        )
    return manifests.read_extra(path)


def _state(actor: Actor, *, loading: bool, random_states: bool = True) -> dict[str, Any]:
    """Everything of this rank that is stored, as dist_checkpointing wants it."""
    actor.gather_parameters()
    model = model_state(actor.policy)
    state: dict[str, Any] = {
        **(model if actor.policy.adapters is None else adapters_alone(model)),
        "optimizer": actor.optimizer.sharded_state_dict(model, is_loading=loading, metadata=dict(SHARDING)),
        "scheduler": actor.scheduler.state_dict(),
        "counts": [actor.num_updates, actor.num_skipped],
    }
    if random_states:
        rank, world = dist.get_rank(), dist.get_world_size()
        state["random"] = [ShardedObject("random", _random_states(), (world,), (rank,))]
    return state


def _random_states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    tracker: Any = get_cuda_rng_tracker()
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "megatron": dict(tracker.get_states()),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def _set_random_states(states: Mapping[str, Any]) -> None:
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states(dict(states["megatron"]))
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["torch"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])


def _prepare(partial: Path, run_dir: str | Path) -> None:
    for torn in manifests.torn(run_dir):
        manifests.remove(torn)
    partial.mkdir(parents=True)


def _write(partial: Path, state: dict[str, Any], topology: Topology) -> str | None:
    """What went wrong on any rank, the same on all; None: written."""
    # Each file is written by this process itself, so its result needs no queue that a process of its own would serve;
    # and a new one holds nothing of a save that failed.
    filesystem_async._results_queue = queue.Queue()
    try:
        dist_checkpointing.save(state, str(partial))
        own = None
    except (OSError, RuntimeError, CheckpointException) as error:
        own = _reason(error)
    reasons: list[str | None] = [None] * topology.world_size
    dist.all_gather_object(reasons, own, group=topology.world_cpu_pg)
    return min((r for r in reasons if r is not None), key=len, default=None)


def _complete(actor: Actor, partial: Path, target: Path, extra_state: Mapping[str, Any], step: int) -> None:
    manifests.write_extra(partial, extra_state)
    manifests.write(partial, manifests.describe(actor.policy, actor.topology, partial, step))
    if target.exists():
        manifests.remove(target)
    manifests.rename(partial, target)


def _on_rank_zero(topology: Topology, action: Any, purpose: str) -> str | None:
    """Do it on rank 0 only; what went wrong there, on all ranks; None: nothing."""
    problem = None
    if topology.rank == 0:
        try:
            action()
        except OSError as error:
            problem = f"cannot {purpose}: {_reason(error)}"
    return topology.broadcast_object_to_all(problem)


def _lack_of_space(topology: Topology, state: dict[str, Any], partial: Path) -> str | None:
    """Refuse before writing what the disk cannot hold."""
    own = sum(_own_sizes(state))
    needed = torch.tensor([own], dtype=torch.int64)
    dist.all_reduce(needed, group=topology.world_cpu_pg)
    free = topology.broadcast_object_to_all(manifests.free_bytes(partial) if topology.rank == 0 else None)
    if int(needed) <= free:
        return None
    return (
        f"it needs {int(needed) / 2**20:,.1f} MiB and {partial.parent} has {free / 2**20:,.1f} MiB free: free some, "
        "or choose another disk with run.output_dir, then resume"
    )


def _own_sizes(state: dict[str, Any]) -> Iterator[int]:
    """Bytes of each tensor that this rank writes, not counting what optimizer factories cut anew (the same bytes)."""
    for value in nested_values(state):
        if isinstance(value, ShardedTensor) and value.data is not None and is_main_replica(value.replica_id):
            yield value.data.nbytes


def _reason(error: BaseException) -> str:
    text = str(error)
    if (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in text:
        return "the disk is full: free some space, or choose another disk with run.output_dir, then resume"
    return text.strip().splitlines()[-1] if text.strip() else type(error).__name__

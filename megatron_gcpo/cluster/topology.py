"""The process groups of one rank, through Megatron-Core's parallel_state, and the few exchanges that the step needs."""

# pyright: reportPrivateImportUsage=false
# torch.distributed documents its stores without listing them as exported.

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_gcpo.cluster import launch
from megatron_gcpo.cluster.grid import RankPlace, num_replicas, rank_grid, replica_size, validate, world_size
from megatron_gcpo.cluster.platform import Platform
from megatron_gcpo.config.records import ClusterConfig

__all__ = ["RankPlace", "Topology", "init", "num_replicas", "rank_grid", "replica_size", "validate", "world_size"]


_GENERATION = itertools.count()
"""Topologies of this process so far, so that one built after another finds the store clean."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where this rank sits, and the groups it talks in: ``*_pg`` for tensors on the device, ``*_cpu_pg`` over gloo."""

    platform: Platform
    rank: int
    world_size: int
    local_rank: int
    """Index of this process on its machine."""
    place: RankPlace
    """This rank's coordinates."""
    tp_size: int
    pp_size: int
    cp_size: int
    dp_size: int
    """Replicas; context-parallel ranks not counted."""
    ep_size: int
    etp_size: int
    replica_ranks: tuple[int, ...]
    """Global ranks of this replica (tensor x pipeline x context), leader first."""
    tp_pg: dist.ProcessGroup = field(repr=False)
    pp_pg: dist.ProcessGroup = field(repr=False)
    dp_pg: dist.ProcessGroup = field(repr=False)
    """The same place in every replica."""
    dp_cp_pg: dist.ProcessGroup = field(repr=False)
    """Everything that gradients of dense layers are reduced over."""
    replica_pg: dist.ProcessGroup = field(repr=False)
    replica_cpu_pg: dist.ProcessGroup = field(repr=False)
    dp_cpu_pg: dist.ProcessGroup = field(repr=False)
    """``dp_pg`` for objects; among leaders it connects all leaders."""
    world_cpu_pg: dist.ProcessGroup = field(repr=False)
    store: dist.Store = field(repr=False)
    """The key-value store through which the ranks found each other."""

    @property
    def tp_rank(self) -> int:
        return self.place.tp

    @property
    def pp_rank(self) -> int:
        return self.place.pp

    @property
    def cp_rank(self) -> int:
        return self.place.cp

    @property
    def dp_rank(self) -> int:
        return self.place.dp

    @property
    def ep_rank(self) -> int:
        return self.place.ep

    @property
    def replica(self) -> int:
        """Index of this replica; a step's prompts are shared by it."""
        return self.place.replica

    @property
    def num_replicas(self) -> int:
        return self.dp_size

    @property
    def leader(self) -> int:
        """Global rank of this replica's leader."""
        return self.place.leader

    @property
    def is_leader(self) -> bool:
        return self.place.is_leader

    @property
    def is_first_stage(self) -> bool:
        return self.place.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """True on the ranks that hold the output layer."""
        return self.place.pp == self.pp_size - 1

    def broadcast_object(self, obj: Any = None) -> Any:
        """The leader's object on every rank of its replica; what other ranks pass is ignored. Must pickle."""
        return self._broadcast(obj, source=self.leader, pg=self.replica_cpu_pg)

    def broadcast_object_to_all(self, obj: Any = None) -> Any:
        """Rank 0's object on every rank. For decisions of the run, never for a replica's text or embeddings."""
        return self._broadcast(obj, source=0, pg=self.world_cpu_pg)

    def sum_over_replicas(self, values: torch.Tensor | Sequence[float]) -> torch.Tensor:
        """Sum over the replicas of what this place holds: a new CPU tensor, float64 when given floats."""
        summed = (
            torch.as_tensor(values, dtype=None if isinstance(values, torch.Tensor) else torch.float64).cpu().clone()
        )
        dist.all_reduce(summed, group=self.dp_cpu_pg)
        return summed

    def gather_objects_from_leaders(self, obj: Any) -> list[Any] | None:
        """On rank 0 the objects of all leaders, by replica; None elsewhere. All ranks may call, leaders must."""
        if not self.is_leader:
            return None
        objects = [None] * self.num_replicas if self.rank == 0 else None
        dist.gather_object(obj, objects, dst=0, group=self.dp_cpu_pg)
        return objects

    def close(self) -> None:
        """Leave all groups. The topology must not be used afterwards."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

    def _broadcast(self, obj: Any, *, source: int, pg: dist.ProcessGroup) -> Any:
        box = [obj if self.rank == source else None]
        dist.broadcast_object_list(box, src=source, group=pg)
        return box[0]


def init(cluster: ClusterConfig, platform: Platform, env: launch.WorkerEnv | None = None) -> Topology:
    """Join the other ranks and build all groups; every rank must call it.

    ``env`` is where this process stands (default: what its starter left in the environment). Raises ValueError when the
    number of processes started is not the one configured, or the sizes are impossible.
    """
    from megatron.core import parallel_state

    ps: Any = parallel_state  # its annotations leave it open whether groups exist
    validate(cluster)
    env = env or launch.worker_env()
    if env.world_size != world_size(cluster):
        raise ValueError(
            f"{env.world_size} processes were started, but cluster.num_nodes {cluster.num_nodes} x processes_per_node "
            f"{cluster.processes_per_node} is {world_size(cluster)}: make them equal"
        )
    timeout = timedelta(seconds=cluster.collective_timeout_s)
    if platform.name == "cuda":
        torch.cuda.set_device(env.local_rank)
    else:
        torch.set_num_threads(cluster.threads_per_process)
    store = launch.connect(env, timeout)
    dist.init_process_group(
        platform.backend,
        store=dist.PrefixStore(f"groups{next(_GENERATION)}", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timeout,
    )
    ps.initialize_model_parallel(
        tensor_model_parallel_size=cluster.tensor_model_parallel_size,
        pipeline_model_parallel_size=cluster.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=cluster.virtual_pipeline_model_parallel_size,
        context_parallel_size=cluster.context_parallel_size,
        expert_model_parallel_size=cluster.expert_model_parallel_size,
        expert_tensor_parallel_size=cluster.expert_tensor_parallel_size,
        distributed_timeout_minutes=cluster.collective_timeout_s / 60,
    )
    grid = rank_grid(cluster)
    place = grid[env.rank]
    replicas = [tuple(p.rank for p in grid if p.replica == r) for r in range(num_replicas(cluster))]
    replica_pg = _own_group(replicas, place.replica, platform.backend, timeout)
    gloo = platform.backend == "gloo"
    return Topology(
        platform=platform,
        rank=env.rank,
        world_size=env.world_size,
        local_rank=env.local_rank,
        place=place,
        tp_size=cluster.tensor_model_parallel_size,
        pp_size=cluster.pipeline_model_parallel_size,
        cp_size=cluster.context_parallel_size,
        dp_size=num_replicas(cluster),
        ep_size=cluster.expert_model_parallel_size,
        etp_size=ps.get_expert_tensor_parallel_world_size(),
        replica_ranks=replicas[place.replica],
        tp_pg=ps.get_tensor_model_parallel_group(),
        pp_pg=ps.get_pipeline_model_parallel_group(),
        dp_pg=ps.get_data_parallel_group(),
        dp_cp_pg=ps.get_data_parallel_group(with_context_parallel=True),
        replica_pg=replica_pg,
        replica_cpu_pg=replica_pg if gloo else _own_group(replicas, place.replica, "gloo", timeout),
        dp_cpu_pg=ps.get_data_parallel_group_gloo(),
        world_cpu_pg=_own_group([range(env.world_size)], 0, "gloo", timeout),
        store=store,
    )


def _own_group(groups: Sequence[Sequence[int]], own: int, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Groups are made by all ranks together, one after the other; a rank keeps its own."""
    made = [dist.new_group(list(ranks), backend=backend, timeout=timeout) for ranks in groups]
    return made[own]  # pyright: ignore[reportReturnType]

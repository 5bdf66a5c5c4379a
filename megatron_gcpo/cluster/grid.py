"""The rank grid, computed without any process: who sits where, and which sizes are possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the configuration checks itself against this file
    from megatron_gcpo.config.records import ClusterConfig


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Coordinates of one rank. Each is an index along its axis, starting with 0."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    """Tensor-parallel index inside an expert."""
    ep: int
    """Which share of the experts this rank holds."""
    edp: int
    """Data-parallel index among the ranks that hold the same experts."""
    replica: int
    """The data-parallel replica: ``dp``."""
    leader: int
    """Global rank of the replica's first rank, which generates, verifies and credits for it."""

    @property
    def is_leader(self) -> bool:
        return self.rank == self.leader


def world_size(cluster: ClusterConfig) -> int:
    """Number of processes of the run."""
    return cluster.num_nodes * cluster.processes_per_node


def replica_size(cluster: ClusterConfig) -> int:
    """Number of ranks that hold one copy of the model: tensor x pipeline x context."""
    return cluster.tensor_model_parallel_size * cluster.pipeline_model_parallel_size * cluster.context_parallel_size


def num_replicas(cluster: ClusterConfig) -> int:
    """Number of data-parallel replicas."""
    return world_size(cluster) // replica_size(cluster)


def expert_tensor_parallel_size(cluster: ClusterConfig) -> int:
    """Tensor-parallel size of the experts; Megatron-Core's default is that of the dense layers."""
    return cluster.expert_tensor_parallel_size or cluster.tensor_model_parallel_size


def rank_grid(cluster: ClusterConfig) -> tuple[RankPlace, ...]:
    """The place of every rank, in Megatron-Core's default order ``tp-cp-ep-dp-pp``: tensor fastest, pipeline slowest.

    Dense layers divide a pipeline stage into tp x cp x dp, experts divide the same ranks into etp x ep x edp.
    The sizes must have passed :func:`validate`.
    """
    tp, cp, dp = cluster.tensor_model_parallel_size, cluster.context_parallel_size, num_replicas(cluster)
    etp, ep = expert_tensor_parallel_size(cluster), cluster.expert_model_parallel_size
    ranks_per_stage = tp * cp * dp
    places = []
    for rank in range(world_size(cluster)):
        pp, place = divmod(rank, ranks_per_stage)
        replica = place // (tp * cp)
        places.append(
            RankPlace(
                rank=rank,
                tp=place % tp,
                cp=place // tp % cp,
                dp=replica,
                pp=pp,
                etp=place % etp,
                ep=place // etp % ep,
                edp=place // (etp * ep),
                replica=replica,
                leader=replica * tp * cp,
            )
        )
    return tuple(places)


def validate(
    cluster: ClusterConfig,
    *,
    num_attention_heads: int | None = None,
    num_kv_heads: int | None = None,
    num_layers: int | None = None,
    num_experts: int | None = None,
    vocab_size: int | None = None,
    ffn_hidden_size: int | None = None,
    moe_ffn_hidden_size: int | None = None,
    prompts_per_step: int | None = None,
    sft_rows_per_step: int | None = None,
) -> None:
    """Raise ValueError, with the numbers that would work, when the parallel sizes do not fit together or the model.

    What is None is not checked; leave ``num_layers`` None when the model's Megatron options place layers unevenly.
    """
    _validate_processes(cluster)
    tp, etp = cluster.tensor_model_parallel_size, expert_tensor_parallel_size(cluster)
    _validate_heads(tp, num_attention_heads, num_kv_heads)
    _must_divide("tensor_model_parallel_size", tp, ffn_hidden_size, "hidden units of a feed-forward layer")
    if vocab_size is not None and vocab_size < tp:
        raise ValueError(f"cluster.tensor_model_parallel_size {tp} exceeds the vocabulary of {vocab_size}: use less")
    _validate_layers(cluster, num_layers)
    _validate_experts(cluster, num_experts)
    if num_experts:
        _must_divide("expert_tensor_parallel_size", etp, moe_ffn_hidden_size, "hidden units of an expert")
    for field, rows in (("rollout.prompts_per_step", prompts_per_step), ("train.sft_rows_per_step", sft_rows_per_step)):
        if rows is not None:
            made_of = f" ({world_size(cluster)} processes / {replica_size(cluster)} per replica)"
            check_shares(field, rows, num_replicas(cluster), made_of=made_of)


def check_shares(field: str, rows: int, num_replicas: int, *, made_of: str = "") -> None:
    """Refuse a step that the replicas cannot share evenly, naming the nearest numbers that work."""
    if rows < 1 or rows % num_replicas:
        below = rows // num_replicas * num_replicas
        near = [n for n in (below, below + num_replicas) if n > 0]
        raise ValueError(
            f"{field} {rows} cannot be shared evenly by {num_replicas} data-parallel replicas{made_of}: use {_one_of(near)}"
        )


def _validate_heads(tp: int, heads: int | None, kv_heads: int | None) -> None:
    def suits_kv(size: int) -> bool:
        return kv_heads is None or kv_heads % size == 0 or size % kv_heads == 0

    works = _divisors(heads) if heads is not None else range(1, 2 * max(tp, kv_heads or 1) + 1)
    advice = f"use {_one_of([size for size in works if suits_kv(size)])}"
    if heads is not None and heads % tp:
        raise ValueError(
            f"cluster.tensor_model_parallel_size {tp} does not divide the {heads} attention heads: {advice}"
        )
    if not suits_kv(tp):
        raise ValueError(
            f"cluster.tensor_model_parallel_size {tp} is neither a divisor nor a multiple of the {kv_heads} key-value "
            f"heads: {advice}"
        )


def _validate_processes(cluster: ClusterConfig) -> None:
    world, replica = world_size(cluster), replica_size(cluster)
    if world % replica:
        raise ValueError(
            f"{world} processes (cluster.num_nodes {cluster.num_nodes} x processes_per_node "
            f"{cluster.processes_per_node}) do not divide into replicas of {replica} (tensor "
            f"{cluster.tensor_model_parallel_size} x pipeline {cluster.pipeline_model_parallel_size} x context "
            f"{cluster.context_parallel_size}): start a multiple of {replica} processes, or choose sizes whose "
            f"product is {_one_of(_divisors(world))}"
        )
    pp, vpp = cluster.pipeline_model_parallel_size, cluster.virtual_pipeline_model_parallel_size
    if vpp is not None and pp == 1:
        raise ValueError(
            f"cluster.virtual_pipeline_model_parallel_size {vpp} needs a pipeline: set pipeline_model_parallel_size to "
            "2 or more, or leave the virtual size out"
        )
    if cluster.sequence_parallel and cluster.tensor_model_parallel_size == 1:
        raise ValueError(
            "cluster.sequence_parallel splits activations over tensor-parallel ranks, of which there is one: set it to "
            "false, or tensor_model_parallel_size to 2 or more"
        )
    if cluster.platform == "cpu" and cluster.context_parallel_size > 1:
        raise ValueError(
            f"cluster.context_parallel_size {cluster.context_parallel_size} needs the fused attention of Transformer "
            "Engine, which needs CUDA: use 1 on the CPU"
        )


def _validate_layers(cluster: ClusterConfig, num_layers: int | None) -> None:
    pp, vpp = cluster.pipeline_model_parallel_size, cluster.virtual_pipeline_model_parallel_size or 1
    if num_layers is None or num_layers % (pp * vpp) == 0:
        return
    stages = f"pipeline_model_parallel_size {pp}" + (
        f" x virtual_pipeline_model_parallel_size {vpp}" if vpp > 1 else ""
    )
    works = [n for n in _divisors(num_layers) if world_size(cluster) % n == 0]
    raise ValueError(
        f"cluster.{stages} does not divide the {num_layers} layers: use {_one_of(works)} stages, or place the layers "
        "with model.megatron.num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
    )


def _validate_experts(cluster: ClusterConfig, num_experts: int | None) -> None:
    ep, etp, world = cluster.expert_model_parallel_size, expert_tensor_parallel_size(cluster), world_size(cluster)
    pp = cluster.pipeline_model_parallel_size
    if num_experts == 0 and max(ep, cluster.expert_tensor_parallel_size or 1) > 1:
        raise ValueError(
            "cluster.expert_model_parallel_size and expert_tensor_parallel_size are for models with experts, and this "
            "one has none: leave them out"
        )
    if world % (etp * ep * pp):
        works = [n for n in _divisors(world // pp) if (world // pp) % (etp * n) == 0]
        raise ValueError(
            f"{world} processes do not divide into expert tensor {etp} x expert parallel {ep} x pipeline {pp}: use "
            f"cluster.expert_model_parallel_size {_one_of(works)}"
            if works
            else f"{world} processes do not divide into expert tensor {etp} x pipeline {pp}: set "
            f"cluster.expert_tensor_parallel_size to {_one_of(_divisors(world // pp))}"
        )
    if not num_experts:
        return
    _must_divide("expert_model_parallel_size", ep, num_experts, "experts")
    if cluster.tensor_model_parallel_size > 1 and not cluster.sequence_parallel:
        raise ValueError(
            "Megatron-Core trains experts under tensor parallelism only with sequence parallelism: set "
            "cluster.sequence_parallel=true (or tensor_model_parallel_size=1)"
        )


def _must_divide(field: str, size: int, total: int | None, what: str) -> None:
    if total is not None and total % size:
        raise ValueError(f"cluster.{field} {size} does not divide the {total} {what}: use {_one_of(_divisors(total))}")


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _one_of(numbers: list[int]) -> str:
    """ "1, 2 or 4"; long lists keep their small end, which is where parallel sizes are."""
    if len(numbers) > 8:
        return ", ".join(map(str, numbers[:8])) + ", ..."
    return " or ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))

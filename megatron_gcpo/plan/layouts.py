"""Every legal layout of a recipe on a number of GPUs, judged by memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_gcpo.cluster.grid import num_replicas, replica_size, validate
from megatron_gcpo.config.records import ClusterConfig, Config
from megatron_gcpo.plan.duration import Duration, duration
from megatron_gcpo.plan.hardware import GIB, GPUS_PER_NODE, Efficiency, Gpu
from megatron_gcpo.plan.memory import Memory, Workload, memory
from megatron_gcpo.plan.parameters import StageParameters
from megatron_gcpo.plan.shape import Shape
from megatron_gcpo.policy.hf_config import PLACES_LAYERS


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout with its numbers."""

    cluster: ClusterConfig
    engine_tp: int
    memory: Memory
    duration: Duration
    room: float
    """Bytes a rank may use."""

    least_cache: float
    """Bytes of KV cache without which the engine does not start: one sequence of the greatest length."""
    is_own: bool
    """The recipe's own layout, engine included."""

    @property
    def fits(self) -> bool:
        return self.needed <= self.room and self.memory.kinds["KV cache"] >= self.least_cache

    @property
    def needed(self) -> float:
        """Bytes of the fullest phase with the smallest KV cache."""
        kinds = {**self.memory.kinds, "KV cache": self.least_cache}
        return replace(self.memory, kinds=kinds).peak

    @property
    def shortage(self) -> str:
        """What does not fit."""
        if self.needed > self.room:
            return f"{self.needed / GIB:.1f} GiB are needed, {self.room / GIB:.1f} are there"
        cache, least = self.memory.kinds["KV cache"] / GIB, self.least_cache / GIB
        return (
            f"rollout.vllm.gpu_memory_utilization leaves a KV cache of {cache:.1f} GiB, one sequence needs {least:.1f}"
        )

    @property
    def name(self) -> str:
        c = self.cluster
        parts = [f"TP{c.tensor_model_parallel_size}", f"PP{c.pipeline_model_parallel_size}"]
        vpp = c.virtual_pipeline_model_parallel_size
        parts += [f"VPP{vpp}"] if vpp else []
        parts += [f"EP{c.expert_model_parallel_size}"] if c.expert_model_parallel_size > 1 else []
        return " ".join([*parts, f"DP{num_replicas(c)}, engine TP{self.engine_tp}"])


def legal_layouts(config: Config, shape: Shape, num_gpus: int) -> Iterator[ClusterConfig]:
    """Tensor parallelism inside a node, pipeline stages of equal depth, experts spread over the ranks of a stage.

    Sequence parallelism whenever tensors are cut; experts whole (their tensor-parallel size is 1). A recipe that places
    its layers itself (num_layers_in_first_pipeline_stage, ...) keeps its number of stages. Not offered: context
    parallelism, which the trainer refuses, and more tensor-parallel ranks than key-value heads.
    """
    placed = bool(PLACES_LAYERS & config.model.megatron.keys())
    tps = [n for n in (1, 2, 4, 8) if n <= min(GPUS_PER_NODE, num_gpus)]
    depths = [n for n in range(1, shape.num_layers + 1) if shape.num_layers % n == 0]
    pps = [n for n in ([config.cluster.pipeline_model_parallel_size] if placed else depths) if num_gpus % n == 0]
    eps = [n for n in range(1, shape.num_experts + 1) if shape.num_experts % n == 0] if shape.num_experts else [1]
    for tp in tps:
        for pp in pps:
            for ep in eps:
                if (num_gpus // pp) % ep:
                    continue
                cluster = config.cluster.model_copy(
                    update={
                        "platform": "auto",
                        "num_nodes": max(1, num_gpus // GPUS_PER_NODE),
                        "processes_per_node": min(num_gpus, GPUS_PER_NODE),
                        "tensor_model_parallel_size": tp,
                        "pipeline_model_parallel_size": pp,
                        "virtual_pipeline_model_parallel_size": None,
                        "context_parallel_size": 1,
                        "expert_model_parallel_size": ep,
                        "expert_tensor_parallel_size": 1 if shape.num_experts else None,
                        "sequence_parallel": tp > 1,
                    }
                )
                try:
                    validate(
                        cluster,
                        num_attention_heads=shape.heads,
                        num_kv_heads=shape.kv_heads,
                        num_layers=None if placed else shape.num_layers,
                        num_experts=shape.num_experts,
                        ffn_hidden_size=shape.ffn,
                        prompts_per_step=config.rollout.prompts_per_step,
                    )
                except ValueError:
                    continue
                if shape.kv_heads % tp == 0:
                    yield cluster


def rough_bytes(config: Config, cluster: ClusterConfig, whole: StageParameters) -> float:
    """A lower bound of a rank's weights and gradients, to spare models that cannot fit from being built.

    whole: the model uncut.
    """
    pp, tp, ep = (
        cluster.pipeline_model_parallel_size,
        cluster.tensor_model_parallel_size,
        cluster.expert_model_parallel_size,
    )
    weights = (whole.dense / tp + whole.expert / ep) * (2 if config.model.dtype == "bf16" else 4)
    return (weights + 2 * (whole.trained_dense / tp + whole.trained_expert / ep)) / pp


def make_plans(
    config: Config,
    cluster: ClusterConfig,
    counted: tuple[Shape, tuple[StageParameters, ...]],
    work: Workload,
    gpu: Gpu,
    efficiency: Efficiency,
    old_logprobs: bool,
) -> Iterator[Plan]:
    """Memory and time of one layout, once for each size of engine: each replica has one, on GPUs of its own."""
    shape, stages = counted
    served = config.rollout.engine == "vllm_server"
    largest = GPUS_PER_NODE if served else min(GPUS_PER_NODE, replica_size(cluster))
    for engine_tp in (n for n in (1, 2, 4, 8) if n <= largest and shape.heads % n == 0):
        sized = replace(work, engine_tp=engine_tp)
        used = memory(config, cluster, shape, stages, sized)
        room = gpu.memory_bytes * (1 - efficiency.reserve)
        weights = used.kinds["engine weights"]
        # what is left beside everything else in the phases in which the cache exists
        others = [size for phase, size in used.phase_bytes().items() if "KV cache" in used.phases[phase]]
        free = room - (weights if served else max(others))
        allowed = gpu.memory_bytes * config.rollout.vllm.gpu_memory_utilization - weights
        cache = max(0.0, min(free, allowed))
        kinds = {**used.kinds, "KV cache": cache}
        spent = duration(config, cluster, shape, stages, sized, gpu, efficiency, cache, old_logprobs)
        yield Plan(
            cluster=cluster,
            engine_tp=engine_tp,
            memory=replace(used, kinds=kinds),
            duration=spent,
            room=room,
            least_cache=shape.kv_bytes_per_token(engine_tp) * work.longest,
            is_own=cluster == own_cluster(config) and engine_tp == config.rollout.vllm.tensor_parallel_size,
        )


def own_cluster(config: Config) -> ClusterConfig:
    """The recipe's layout as ``legal_layouts`` would say it."""
    return config.cluster.model_copy(update={"platform": "auto"})

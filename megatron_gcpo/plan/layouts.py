"""Every legal layout of a recipe on a number of GPUs, judged by memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_gcpo.cluster.grid import num_replicas, replica_size, validate
from megatron_gcpo.config.records import ClusterConfig, Config
from megatron_gcpo.plan.duration import Duration, duration
from megatron_gcpo.plan.hardware import GPUS_PER_NODE, Efficiency, Gpu
from megatron_gcpo.plan.memory import Memory, Workload, memory
from megatron_gcpo.plan.parameters import StageParameters
from megatron_gcpo.plan.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout with its numbers."""

    cluster: ClusterConfig
    engine_tp: int
    memory: Memory
    duration: Duration
    room: float
    """Bytes a rank may use."""

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.room and self.memory.kinds["KV cache"] > 0

    @property
    def name(self) -> str:
        c = self.cluster
        parts = [f"TP{c.tensor_model_parallel_size}", f"PP{c.pipeline_model_parallel_size}"]
        parts += [f"EP{c.expert_model_parallel_size}"] if c.expert_model_parallel_size > 1 else []
        return " ".join([*parts, f"DP{num_replicas(c)}, engine TP{self.engine_tp}"])


def legal_layouts(config: Config, shape: Shape, num_gpus: int) -> Iterator[ClusterConfig]:
    """Tensor parallelism inside a node, pipeline stages of equal depth, experts spread over the ranks of a stage.

    Sequence parallelism whenever tensors are cut; experts whole (their tensor-parallel size is 1). Context parallelism
    is not offered: the trainer does not run it.
    """
    tps = [n for n in (1, 2, 4, 8) if n <= min(GPUS_PER_NODE, num_gpus)]
    pps = [n for n in range(1, shape.num_layers + 1) if shape.num_layers % n == 0 and num_gpus % n == 0]
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
                        num_layers=shape.num_layers,
                        num_experts=shape.num_experts,
                        ffn_hidden_size=shape.ffn,
                        prompts_per_step=config.rollout.prompts_per_step,
                    )
                except ValueError:
                    continue
                if shape.kv_heads % tp == 0:  # what the trainer accepts
                    yield cluster


def rough_bytes(config: Config, cluster: ClusterConfig, shape: Shape, parameters: tuple[int, int]) -> float:
    """A lower bound of a rank's weights, gradients and optimizer state, to spare models that cannot fit from being built.

    parameters: (dense, expert) elements of the whole model.
    """
    pp, tp = cluster.pipeline_model_parallel_size, cluster.tensor_model_parallel_size
    dense, expert = parameters[0] / (tp * pp), parameters[1] / (cluster.expert_model_parallel_size * pp)
    return (dense + expert) * ((2 if config.model.dtype == "bf16" else 4) + 4)


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
        free = room - (used.kinds["engine weights"] if served else used.phase_bytes()["generate"])
        cache = max(0.0, min(free, gpu.memory_bytes * config.rollout.vllm.gpu_memory_utilization))
        kinds = {**used.kinds, "KV cache": cache}
        spent = duration(config, cluster, shape, stages, sized, gpu, efficiency, cache, old_logprobs)
        yield Plan(cluster=cluster, engine_tp=engine_tp, memory=replace(used, kinds=kinds), duration=spent, room=room)

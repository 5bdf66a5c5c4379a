"""Seconds of each phase, from FLOP and byte counts and stated efficiencies; no measurement is hidden in them.

Every line of ``Arithmetic`` is a product that a reader can check by hand; ``--explain`` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_gcpo.cluster.grid import expert_tensor_parallel_size, num_replicas, replica_size, world_size
from megatron_gcpo.config.records import ClusterConfig, Config
from megatron_gcpo.plan.hardware import GPUS_PER_NODE, Efficiency, Gpu
from megatron_gcpo.plan.memory import Workload, num_micro_batches
from megatron_gcpo.plan.parameters import StageParameters
from megatron_gcpo.plan.shape import Shape

ENCODER_FLOPS_PER_TOKEN = 2 * 21.3e6
"""all-MiniLM-L6-v2: two FLOP per weight of its six layers and token, attention left out."""
DECODE_STEP_OVERHEAD_S = 0.004
"""Scheduling and kernel launches of one decoding step."""


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Seconds of a step by phase, the FLOP of its training part, and how each number came about."""

    phases: Mapping[str, float]
    train_flops: float
    explained: tuple[str, ...]

    @property
    def total(self) -> float:
        return sum(self.phases.values())


def forward_flops_per_token(shape: Shape, mean_context: float) -> tuple[float, float]:
    """(dense, expert) FLOP of a forward pass for one token: two per weight it meets, plus attention over its past.

    ``mean_context``: tokens attended to, on average: half of a causal sequence. Scores and their sum take 2 x (query +
    value width) x context (arXiv 2001.08361, section 2.1, with the causal half counted once).
    """
    moe, dense_layers = shape.num_moe_layers, shape.num_layers - shape.num_moe_layers
    attention = shape.num_layers * (2 * shape.attention_weights + 2 * (shape.query + shape.value) * mean_context)
    dense = attention + 2 * shape.dense_weights * dense_layers + 2 * shape.hidden * shape.vocab
    return dense, 2 * shape.active_expert_weights * moe


def duration(
    config: Config,
    cluster: ClusterConfig,
    shape: Shape,
    stages: tuple[StageParameters, ...],
    work: Workload,
    gpu: Gpu,
    efficiency: Efficiency,
    kv_cache_bytes: float,
    old_logprobs: bool,
) -> Duration:
    """The phases of one step on this layout.

    Args:
        kv_cache_bytes: room for the KV cache on each GPU of an engine.
        old_logprobs: whether a forward pass precedes the update.
    """
    ranks = world_size(cluster)
    generate, generate_lines = _generate(config, cluster, shape, work, gpu, efficiency, kv_cache_bytes)
    dense, expert = forward_flops_per_token(shape, (work.prompt_tokens + work.new_tokens) / 2)
    forward_s = work.tokens * (dense / efficiency.train + expert / efficiency.experts) / (gpu.flops * ranks)
    uneven = _imbalance(shape, stages, dense, expert)
    bubble = uneven * (1 + idle_share(cluster, work))
    passes = 3 + (config.model.megatron.get("recompute_granularity") == "full")
    extra = int(old_logprobs) + int(work.has_reference)
    push, push_line = _push(config, cluster, stages, work, gpu, efficiency)
    embed = work.sequences * work.new_tokens * ENCODER_FLOPS_PER_TOKEN / (gpu.flops * 0.1 * num_replicas(cluster))
    phases = {
        "generate": generate,
        "embed": embed,
        "logprobs": extra * forward_s * bubble,
        "update": passes * forward_s * bubble,
        "push": push,
    }
    lines = (
        *generate_lines,
        f"embed: {work.sequences} texts x {work.new_tokens} tokens x {ENCODER_FLOPS_PER_TOKEN:.3g} FLOP / "
        f"({num_replicas(cluster)} GPUs x {gpu.flops:.3g} x 0.1) = {embed:.2f} s (at most: only correct answers, once each)",
        f"forward: {work.tokens} tokens x ({dense:.4g} dense / {efficiency.train} + {expert:.4g} expert / "
        f"{efficiency.experts}) FLOP / ({ranks} GPUs x {gpu.flops:.3g}) = {forward_s:.2f} s",
        f"pipeline: x {uneven:.3f} for its slowest stage x {bubble / uneven:.3f} for its bubble",
        f"logprobs: {extra} forward passes = {phases['logprobs']:.2f} s",
        f"update: {passes} forward passes' worth (backward 2{', recomputation 1' if passes == 4 else ''}) = "
        f"{phases['update']:.2f} s",
        push_line,
    )
    return Duration(phases=phases, train_flops=3 * work.tokens * (dense + expert), explained=lines)


def _generate(
    config: Config,
    cluster: ClusterConfig,
    shape: Shape,
    work: Workload,
    gpu: Gpu,
    efficiency: Efficiency,
    kv_cache_bytes: float,
) -> tuple[float, list[str]]:
    """All sequences in waves that fit the KV cache; a step reads the weights and the cache once."""
    engines = num_replicas(cluster)
    sequences = math.ceil(work.sequences / engines)
    per_token = shape.kv_bytes_per_token(work.engine_tp)
    per_sequence = per_token * (work.prompt_tokens + work.new_tokens)
    at_once = max(1, min(sequences, int(kv_cache_bytes // per_sequence)))
    waves = math.ceil(sequences / at_once)
    weights = _weights_read(shape, at_once, work) / work.engine_tp
    cache = at_once * per_token * (work.prompt_tokens + work.new_tokens / 2)
    step_s = (weights + cache) / (gpu.memory_bandwidth * efficiency.decode) + DECODE_STEP_OVERHEAD_S
    dense, expert = forward_flops_per_token(shape, work.prompt_tokens / 2)
    # each distinct prompt is read once: the samples of its group share the prefix
    prompts = work.sequences / config.rollout.group_size * work.prompt_tokens
    prefill_s = prompts * (dense + expert) / (gpu.flops * efficiency.prefill * engines * work.engine_tp)
    total = waves * work.new_tokens * step_s + prefill_s
    return total, [
        f"engines: {engines} of {work.engine_tp} GPUs, {sequences} sequences each, {at_once} at once "
        f"({kv_cache_bytes / 1e9:.1f} GB of cache / {per_sequence / 1e9:.3f} GB): {waves} waves",
        f"decoding step: ({weights / 1e9:.2f} GB weights + {cache / 1e9:.2f} GB cache) / ({gpu.memory_bandwidth / 1e12} TB/s "
        f"x {efficiency.decode}) + {DECODE_STEP_OVERHEAD_S * 1e3:.0f} ms = {step_s * 1e3:.1f} ms",
        f"generate: {waves} x {work.new_tokens} steps + {prefill_s:.2f} s of prompts = {total:.1f} s",
    ]


def _weights_read(shape: Shape, batch: int, work: Workload) -> float:
    """Bytes a decoding step reads: all dense weights, and of the experts those that some row is routed to.

    With uniform routing an expert is missed by a row with probability 1 - k / E, by the batch with its power (derived).
    """
    dense_layers = shape.num_layers - shape.num_moe_layers
    head = work.engine_bytes * shape.hidden * shape.vocab
    dense = shape.attention_weights * shape.num_layers + shape.dense_weights * dense_layers
    if not shape.num_experts:
        return work.engine_matrix_bytes * dense + head
    met = 1 - (1 - shape.experts_per_token / shape.num_experts) ** batch
    width = shape.num_experts * shape.expert_ffn * met + shape.shared_ffn
    experts = (3 if shape.gated else 2) * shape.hidden * width * shape.num_moe_layers
    return work.engine_matrix_bytes * (dense + experts) + head


def idle_share(cluster: ClusterConfig, work: Workload) -> float:
    """Of a pipeline: (stages - 1) / (micro-batches x virtual stages) (arXiv 2104.04473)."""
    pp, vpp = cluster.pipeline_model_parallel_size, cluster.virtual_pipeline_model_parallel_size or 1
    return (pp - 1) / (num_micro_batches(cluster, work) * vpp)


def _imbalance(shape: Shape, stages: Sequence[StageParameters], dense: float, expert: float) -> float:
    """FLOP of the slowest stage over those of the mean one; the output layer is the last stage's (derived)."""
    head = 2 * shape.hidden * shape.vocab
    of_moe = expert / max(shape.num_moe_layers, 1)
    ffn = 2 * shape.dense_weights
    attention = (dense - head - ffn * (shape.num_layers - shape.num_moe_layers)) / shape.num_layers
    flops = [s.layers * attention + (s.layers - s.moe_layers) * ffn + s.moe_layers * of_moe for s in stages]
    flops[-1] += head
    return max(flops) * len(flops) / sum(flops)


def _push(
    config: Config,
    cluster: ClusterConfig,
    stages: tuple[StageParameters, ...],
    work: Workload,
    gpu: Gpu,
    efficiency: Efficiency,
) -> tuple[float, str]:
    """Every engine rank receives its share of the model, or the adapters alone; sharded pushes move no byte twice."""
    tp, experts = cluster.tensor_model_parallel_size, expert_tensor_parallel_size(cluster)
    experts *= cluster.expert_model_parallel_size
    if config.rollout.vllm.lora:
        elements = sum(s.trained_dense * tp + s.trained_expert * experts for s in stages)
    else:
        elements = sum(s.dense * tp + s.expert * experts for s in stages)
    model_bytes = min(work.element_bytes, work.engine_matrix_bytes) * elements
    received = model_bytes / work.engine_tp
    inside = config.rollout.engine != "vllm_server" and replica_size(cluster) <= GPUS_PER_NODE
    bandwidth = (gpu.link_bandwidth if inside else gpu.network_bandwidth) * efficiency.copy
    seconds = received / bandwidth
    where = "NVLink" if inside else "the network"
    return seconds, (
        f"push: {model_bytes / 1e9:.1f} GB of weights / {work.engine_tp} engine ranks / ({bandwidth / 1e9:.0f} GB/s over "
        f"{where}) = {seconds:.2f} s"
    )

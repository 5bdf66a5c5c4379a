"""Bytes on one rank, by kind and phase.

Weights, gradients and optimizer state follow from exact parameter counts. Activations are what autograd keeps for the
backward pass, derived by going through a layer (``layer_activation_bytes``); for Megatron's own layers a test compares
them with the tensors that really are kept. For Transformer Engine's fused layers they are derived and not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_gcpo.cluster.grid import expert_tensor_parallel_size
from megatron_gcpo.config.records import ClusterConfig, Config
from megatron_gcpo.plan.parameters import StageParameters, dense_replicas, expert_replicas
from megatron_gcpo.plan.shape import Shape

FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The numbers of a step that memory and time depend on."""

    sequences: int
    """Of a step, over all replicas."""
    prompt_tokens: int
    """Of one sequence, on average."""
    new_tokens: int
    """Drawn for one sequence, on average."""
    longest: int
    """Tokens of the longest sequence allowed."""
    micro_batch_tokens: int
    mini_batches: int
    engine_tp: int
    logits_chunk_tokens: int
    bucket_bytes: int
    element_bytes: int
    """Of a weight or activation: 2 in bf16, 4 in fp32."""
    has_reference: bool

    @property
    def tokens(self) -> int:
        """Of a step, over all replicas."""
        return self.sequences * (self.prompt_tokens + self.new_tokens)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the rank of one stage that holds most; ``phases`` says which kinds live at once."""

    stage: int
    kinds: Mapping[str, float]
    phases: Mapping[str, tuple[str, ...]]

    def phase_bytes(self) -> dict[str, float]:
        return {phase: sum(self.kinds[kind] for kind in kinds) for phase, kinds in self.phases.items()}

    @property
    def peak(self) -> float:
        return max(self.phase_bytes().values())


def workload(
    config: Config, mean_new_tokens: int | None, mean_prompt_tokens: int | None, has_reference: bool
) -> Workload:
    """The workload of a recipe. Without means, half of the allowed tokens are assumed."""
    rollout = config.rollout
    return Workload(
        sequences=rollout.prompts_per_step * rollout.group_size,
        prompt_tokens=mean_prompt_tokens or max(1, config.data.max_prompt_tokens // 2),
        new_tokens=mean_new_tokens or max(1, rollout.max_new_tokens // 2),
        longest=config.data.max_prompt_tokens + rollout.max_new_tokens,
        micro_batch_tokens=config.train.max_tokens_per_micro_batch,
        mini_batches=config.train.mini_batches,
        engine_tp=rollout.vllm.tensor_parallel_size,
        logits_chunk_tokens=config.train.logits_chunk_tokens,
        bucket_bytes=rollout.push.bucket_bytes,
        element_bytes=2 if config.model.dtype == "bf16" else FP32,
        has_reference=has_reference,
    )


def layer_activation_bytes(
    shape: Shape,
    tokens: int,
    *,
    tp: int,
    sequence_parallel: bool,
    moe: bool,
    flash: bool,
    positions: int,
    element: int = 2,
) -> float:
    """What one layer keeps for its backward pass on one rank, without recomputation (derived).

    Per token, widths in elements: norms keep their inputs and outputs (4 x hidden); the q/k norms their inputs, attention
    the rotated q, k, v and its output; the feed-forward part its first product (2 x ffn when gated), the activation and
    the second product's input. Under sequence parallelism the parts of width ``hidden`` lie on one rank in ``tp``.

    Args:
        tokens: of a micro-batch, padding included. positions: of a row, for attention scores without ``flash``.
        flash: fused attention, activation and norms (Transformer Engine); else Megatron's own layers in bf16, which keep
            fp32 copies of what norms and the softmax read, k and v repeated for every query head, and all scores.
        moe: a layer with experts; each token meets ``experts_per_token`` of them.
    """
    hidden_share = tp if sequence_parallel else 1
    query, kv = shape.query / tp, shape.key_value / max(1, min(tp, shape.kv_heads))
    ffn = (shape.experts_per_token * shape.expert_ffn + shape.shared_ffn if moe else shape.ffn) / tp
    wide = 2 if shape.gated else 1
    if flash:
        per_token = element * (4 * shape.hidden / hidden_share + 3 * query + 3 * kv + (wide + 1) * ffn)
        if moe:  # the permuted copies of the tokens, before and after the experts
            per_token += element * 2 * shape.experts_per_token * shape.hidden / hidden_share
        return tokens * per_token
    # repeated for every query head, or else a view that keeps the whole product of q, k and v alive
    values = query if shape.heads > shape.kv_heads else query + 2 * kv
    upcast = FP32 + element  # what a norm reads is kept in fp32 beside the bf16 tensor
    per_token = (
        2 * (upcast + element) * shape.hidden / hidden_share
        + (FP32 + 4 * element) * query
        + (FP32 + element) * kv
        + element * values
        + (2 * wide + 1) * element * ffn
        + (FP32 + element) * shape.heads / tp * positions
    )
    return tokens * per_token


def memory(
    config: Config, cluster: ClusterConfig, shape: Shape, stages: tuple[StageParameters, ...], work: Workload
) -> Memory:
    """The fullest rank of a layout, by kind: at the peak of the phase that needs most."""
    return max((_stage_memory(config, cluster, shape, stage, work) for stage in stages), key=lambda m: m.peak)


def _stage_memory(
    config: Config, cluster: ClusterConfig, shape: Shape, stage: StageParameters, work: Workload
) -> Memory:
    tp, pp = cluster.tensor_model_parallel_size, cluster.pipeline_model_parallel_size
    masters = 0 if work.element_bytes == FP32 else FP32  # fp32 weights are their own masters
    state = masters + 2 * FP32
    last = stage.stage == pp - 1
    kinds = {
        "weights": work.element_bytes * stage.total,
        "reference": work.element_bytes * stage.total if work.has_reference else 0,
        "grads": FP32 * stage.total,
        "optimizer": state * (stage.dense / dense_replicas(cluster) + stage.expert / expert_replicas(cluster)),
        "activations": _activations(config, cluster, shape, stage.stage, work),
        # logits of a chunk, their exponentials and their gradient, in fp32
        "logits": 3 * FP32 * work.logits_chunk_tokens * shape.vocab / tp if last else 0,
        "engine weights": _engine_bytes(shape) / work.engine_tp,
        "KV cache": 0.0,
        "push buckets": 2 * work.bucket_bytes,
    }
    held = ("weights", "reference", "grads", "optimizer")
    asleep = config.rollout.engine == "vllm" and config.rollout.vllm.sleep_level > 0
    with_engine = config.rollout.engine != "vllm_server"
    engine = ("engine weights",) if with_engine and not asleep else ()
    phases = {
        "generate": (*held, *(("engine weights", "KV cache") if with_engine else ())),
        "logprobs": (*held, "logits", *engine),
        "update": (*held, "activations", "logits", *engine),
        "push": (*held, "push buckets", *(("engine weights",) if with_engine else ())),
    }
    return Memory(stage=stage.stage, kinds=kinds, phases=phases)


def _engine_bytes(shape: Shape) -> float:
    """bf16 weights of the whole model in the engine."""
    ffn = shape.dense_weights * (shape.num_layers - shape.num_moe_layers)
    expert = (3 if shape.gated else 2) * shape.hidden * (shape.num_experts * shape.expert_ffn + shape.shared_ffn)
    moe = (expert + shape.hidden * shape.num_experts) * shape.num_moe_layers
    return 2 * (shape.attention_weights * shape.num_layers + ffn + moe + 2 * shape.vocab * shape.hidden)


def _activations(config: Config, cluster: ClusterConfig, shape: Shape, stage: int, work: Workload) -> float:
    """Of all micro-batches in flight on a stage. Interleaving adds its share of one more warm-up (arXiv 2104.04473)."""
    tp, pp = cluster.tensor_model_parallel_size, cluster.pipeline_model_parallel_size
    vpp = cluster.virtual_pipeline_model_parallel_size or 1
    tokens = work.micro_batch_tokens / cluster.context_parallel_size
    layers = shape.num_layers / pp
    in_flight = (pp - stage) + ((pp - 1) / vpp if vpp > 1 else 0)
    share = tp if cluster.sequence_parallel else 1
    options: dict[str, Any] = {
        "tp": tp,
        "sequence_parallel": cluster.sequence_parallel,
        "flash": True,
        "positions": 0,
        "element": work.element_bytes,
    }
    moe_share = shape.num_moe_layers / shape.num_layers
    etp = expert_tensor_parallel_size(cluster)
    whole = (1 - moe_share) * layer_activation_bytes(shape, int(tokens), moe=False, **options) + moe_share * (
        layer_activation_bytes(shape, int(tokens), moe=True, **{**options, "tp": max(tp, etp)})
    )
    if config.model.megatron.get("recompute_granularity") == "full":
        every = int(config.model.megatron.get("recompute_num_layers") or 1)
        kept = work.element_bytes * shape.hidden * tokens / share
        return in_flight * kept * layers / every + every * whole
    return in_flight * layers * whole

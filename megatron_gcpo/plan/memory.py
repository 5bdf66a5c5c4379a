"""Bytes on one rank, by kind and phase.

Weights, gradients and optimizer state follow from exact parameter counts. Activations are what autograd keeps for the
backward pass, derived by going through a layer (``layer_activation_bytes``), and what is in flight while one layer is
differentiated. Tests compare all of it with the tensors that a real actor on the CPU holds, layer by layer and at the
peak of an update. For Transformer Engine's fused layers activations are derived and not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_gcpo.cluster.grid import num_replicas
from megatron_gcpo.config.records import ClusterConfig, Config
from megatron_gcpo.methods import longest_sequences, resolve
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
    """Of a weight or activation of the trainer: 2 in bf16, 4 in fp32."""
    engine_bytes: int
    """Of a weight of the engine's embeddings, and of its matrices unless they are quantized."""
    engine_matrix_bytes: int
    has_reference: bool
    """Whether a second set of weights is lent to the model while the reference policy is scored (policy.reference)."""
    fused: bool = True
    """Transformer Engine's layers; else Megatron's own."""

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
    """The workload of a recipe. Without means, half of the allowed tokens are assumed, in each turn of a conversation.

    A user's turns are read by the engine like a prompt.
    """
    rollout, (method, options) = config.rollout, resolve(config.method)
    turns = 1 if method.environment is None else method.environment.num_turns
    between = 0 if method.environment is None else (turns - 1) * method.environment.max_reply_tokens
    engine_bytes = 2 if (rollout.dtype or config.model.dtype) == "bf16" else FP32
    return Workload(
        sequences=rollout.prompts_per_step * rollout.group_size,
        prompt_tokens=mean_prompt_tokens or max(1, (config.data.max_prompt_tokens + between) // 2),
        new_tokens=mean_new_tokens or max(1, turns * rollout.max_new_tokens // 2),
        longest=max(kind.tokens for kind in longest_sequences(method, options, config)),
        micro_batch_tokens=config.train.max_tokens_per_micro_batch,
        mini_batches=config.train.mini_batches,
        engine_tp=rollout.vllm.tensor_parallel_size,
        logits_chunk_tokens=config.train.logits_chunk_tokens,
        bucket_bytes=rollout.push.bucket_bytes,
        element_bytes=2 if config.model.dtype == "bf16" else FP32,
        engine_bytes=engine_bytes,
        engine_matrix_bytes=engine_bytes if rollout.quantization == "none" else 1,
        has_reference=has_reference and config.model.lora is None,
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
            fp32 copies of what norms and the softmax read, k and v repeated for every query head, and all scores (not
            of latent attention, which is derived for fused layers only).
        moe: a layer with experts; each token meets ``experts_per_token`` of them, evenly spread over the ranks.
    """
    hidden_share = tp if sequence_parallel else 1
    query, kv = shape.query / tp, shape.key_value / min(tp, shape.kv_heads)
    ffn = (shape.experts_per_token * shape.expert_ffn + shape.shared_ffn if moe else shape.ffn) / tp
    wide = 2 if shape.gated else 1
    if flash:
        attention = 3 * query + 3 * kv
        if shape.latent is not None:  # what was compressed, and its norms
            attention = 2 * query + 2 * shape.value / tp + 2 * (shape.latent.query_rank + shape.latent.kv_rank)
        per_token = element * (4 * shape.hidden / hidden_share + attention + (wide + 1) * ffn)
        if moe:  # the permuted copies of the tokens, before and after the experts
            per_token += element * 2 * shape.experts_per_token * shape.hidden / hidden_share
        return tokens * per_token
    # repeated for every query head, or else a view that keeps the whole product of q, k and v alive
    values = query if shape.heads > shape.kv_heads else query + 2 * kv
    copy = FP32 if element < FP32 else 0  # in fp32, of what norms read, kept beside the bf16 tensor
    per_token = (
        2 * (copy + 2 * element) * shape.hidden / hidden_share
        + (copy + 4 * element) * query
        + (copy + element) * kv
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
    masters = 0 if work.element_bytes == FP32 else FP32  # fp32 weights are their own masters
    state = masters + 2 * FP32
    ddp = config.train.ddp
    shards = (
        (dense_replicas(cluster), expert_replicas(cluster)) if ddp.get("use_distributed_optimizer", True) else (1, 1)
    )
    activations, in_work = _activations(config, cluster, shape, stage, work)
    kinds = {
        "weights": work.element_bytes * stage.total,
        "reference": work.element_bytes * stage.total if work.has_reference else 0,
        "grads": (FP32 if ddp.get("grad_reduce_in_fp32", True) else work.element_bytes) * stage.trained,
        "optimizer": state * (stage.trained_dense / shards[0] + stage.trained_expert / shards[1]),
        "activations": activations,
        "layer in work": in_work,
        "logits": _logits(cluster, shape, work) if stage.stage == cluster.pipeline_model_parallel_size - 1 else 0,
        "engine weights": _engine_weights(shape, work) / work.engine_tp,
        "KV cache": 0.0,
        "push buckets": 2 * work.bucket_bytes,
    }
    held = ("weights", "grads", "optimizer")
    rollout = config.rollout
    beside = () if rollout.engine == "vllm_server" else ("engine weights",)
    asleep = rollout.vllm.sleep_level > 0 and rollout.max_policy_lag == 0
    awake = () if asleep or not beside else (*beside, "KV cache")
    phases = {
        "generate": (*held, *beside, *(("KV cache",) if beside else ())),
        "logprobs": (*held, "reference", "logits", *awake),
        "loss": (*held, "activations", "logits", *awake),
        "backward": (*held, "activations", "layer in work", *awake),
        "push": (*held, "push buckets", *(beside if asleep else awake)),
    }
    return Memory(stage=stage.stage, kinds=kinds, phases=phases)


def _engine_weights(shape: Shape, work: Workload) -> float:
    """Of the whole model in the engine."""
    ffn = shape.dense_weights * (shape.num_layers - shape.num_moe_layers)
    expert = (3 if shape.gated else 2) * shape.hidden * (shape.num_experts * shape.expert_ffn + shape.shared_ffn)
    moe = (expert + shape.hidden * shape.num_experts) * shape.num_moe_layers
    matrices = shape.attention_weights * shape.num_layers + ffn + moe
    return work.engine_matrix_bytes * matrices + work.engine_bytes * shape.embeddings


def _logits(cluster: ClusterConfig, shape: Shape, work: Workload) -> float:
    """Of policy.vocab's backward pass (derived from it).

    For a chunk of tokens: the logits, the probabilities and the gradient in fp32, and of the chunk before it the gradient
    twice. For all tokens: hidden states and their gradient, whole on every rank. Of the output layer: its gradient in fp32
    and a chunk's share of it.
    """
    vocab, tokens = shape.vocab / cluster.tensor_model_parallel_size, work.micro_batch_tokens
    chunk = min(work.logits_chunk_tokens, tokens)
    passing = 3 * FP32 + (FP32 + work.element_bytes if chunk < tokens else 0)
    cast = 0 if work.fused or work.element_bytes == FP32 else FP32  # a CPU adds bf16 to fp32 by way of a copy
    share = (work.element_bytes + cast) * shape.hidden
    of_chunk = max(chunk * passing, chunk * (2 * FP32 + work.element_bytes) + share)
    return vocab * (of_chunk + FP32 * shape.hidden) + 2 * work.element_bytes * tokens * shape.hidden


def _activations(
    config: Config, cluster: ClusterConfig, shape: Shape, stage: StageParameters, work: Workload
) -> tuple[float, float]:
    """(kept by all micro-batches in flight on a stage, needed beside it to differentiate one layer).

    A stage has as many micro-batches in flight as there are stages from it to the last; interleaving adds its share of one
    more warm-up (arXiv 2104.04473). Differentiating a layer holds the gradients of its widest products and, under sequence
    parallelism, its input and that one's gradient gathered (derived).
    """
    tp, pp = cluster.tensor_model_parallel_size, cluster.pipeline_model_parallel_size
    vpp = cluster.virtual_pipeline_model_parallel_size or 1
    tokens = work.micro_batch_tokens
    warm_up = (pp - stage.stage) + ((pp - 1) / vpp if vpp > 1 else 0)
    in_flight = min(warm_up, num_micro_batches(cluster, work))
    options: dict[str, Any] = {
        "sequence_parallel": cluster.sequence_parallel,
        "flash": work.fused,
        "positions": 0 if work.fused else work.longest,
        "element": work.element_bytes,
    }
    dense = layer_activation_bytes(shape, tokens, tp=tp, moe=False, **options)
    moe = layer_activation_bytes(shape, tokens, tp=tp, moe=True, **options) if stage.moe_layers else 0.0
    widest = max(dense if stage.layers > stage.moe_layers else 0.0, moe)
    ffn = (3 if shape.gated else 2) * max(
        shape.ffn if stage.layers > stage.moe_layers else 0,
        shape.experts_per_token * shape.expert_ffn + shape.shared_ffn if stage.moe_layers else 0,
    )
    gradients = max(ffn, 2 * shape.query + 2 * shape.key_value) / tp + 2 * shape.hidden
    gradients *= work.element_bytes * tokens
    if config.model.megatron.get("recompute_granularity") != "full":
        return in_flight * ((stage.layers - stage.moe_layers) * dense + stage.moe_layers * moe), gradients
    every = int(config.model.megatron.get("recompute_num_layers") or 1)
    kept = work.element_bytes * shape.hidden * tokens / (tp if cluster.sequence_parallel else 1)
    return in_flight * kept * math.ceil(stage.layers / every), every * widest + gradients


def num_micro_batches(cluster: ClusterConfig, work: Workload) -> int:
    """Of one update on one replica."""
    return max(1, math.ceil(work.tokens / work.mini_batches / num_replicas(cluster) / work.micro_batch_tokens))

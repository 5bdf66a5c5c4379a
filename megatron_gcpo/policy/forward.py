"""Micro-batches through Megatron-Core's pipeline schedules, ending in token statistics instead of logits.

The last stage never returns logits: GPTModel's output processor hands us the hidden state, and the statistics kernel
multiplies it with the (tied or untied) output weights a chunk of tokens at a time.

Sequences of one row are kept apart in two ways. Without Transformer Engine attention gets a mask, causal and within the
segment; rotary embeddings are relative, so a sequence need not start at position 0. With it attention gets the
boundaries (thd) and each sequence its own positions, also cut over context-parallel ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import get_attr_wrapped_model
from torch.nn import functional

from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.policy.head import head_gram_rows
from megatron_gcpo.policy.model import Policy
from megatron_gcpo.policy.pack import MicroBatch, context_shard, row_boundaries, trained_rows
from megatron_gcpo.policy.replay import Replay
from megatron_gcpo.policy.vocab import linear_token_statistics
from megatron_gcpo.types import TokenStats

STATISTICS = ("logprobs_T", "entropy_T", "sum_p2_T", "sum_p2_logp_T")
"""Fields of TokenStats, in the order in which the last stage stacks them; the last two on demand."""


def statistics_names(second_moments: bool, head_gram: bool) -> tuple[str, ...]:
    """Fields of TokenStats that a forward pass stacks, in order."""
    return (*STATISTICS[: 4 if second_moments else 2], *(("head_gram_T",) if head_gram else ()))


@dataclass(frozen=True, kw_only=True)
class Forward:
    """How this rank runs micro-batches: the model, its place, and the vocabulary statistics' settings."""

    policy: Policy
    topology: Topology
    temperature: float
    chunk_tokens: int
    """Tokens whose logits exist at once."""
    replay: Replay | None = None
    """Makes routers follow the routing that a batch brings."""

    @property
    def pad_multiple(self) -> int:
        """Rows of a micro-batch must have a multiple of this length."""
        return self.sequence_multiple * (self.topology.tp_size if self.policy.provider.sequence_parallel else 1)

    @property
    def sequence_multiple(self) -> int:
        """Each sequence of a row must start at a multiple of this."""
        return 2 * self.topology.cp_size if self.topology.cp_size > 1 else 1

    def run(
        self,
        micro: Sequence[MicroBatch],
        on_last_stage: Callable[[MicroBatch, TokenStats], tuple[torch.Tensor, Any]],
        *,
        forward_only: bool,
        second_moments: bool = False,
        head_gram: bool = False,
    ) -> list[Any]:
        """All micro-batches forward, and backward unless ``forward_only``. Collective over the replica.

        on_last_stage(micro-batch on the device, its statistics) returns (scalar loss, report); losses of micro-batches
        are differentiated as scale.loss_factor assumes. Returns the reports in order on the last stage, [] elsewhere.
        second_moments: whether the statistics have sum p^2 and sum p^2 log p; head_gram: whether they have the squared
        gradient of the output layer (not differentiable, whole sequences on a rank).
        """
        chunks = self.policy.chunks
        if len(chunks) > 1 and self.topology.pp_size == 2:
            # Two interleaved stages are each other's previous and next one, and Megatron then mixes up which of the two
            # announced the shape of what: with one shape for all there is nothing to mix up.
            micro = _of_one_shape(micro)
        iterators = [iter(micro) for _ in chunks]
        return get_forward_backward_func()(
            forward_step_func=lambda data, chunk: self._step(
                next(data), chunk, on_last_stage, forward_only, second_moments, head_gram
            ),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro),
            seq_length=micro[0].tokens_RS.shape[1],
            micro_batch_size=micro[0].tokens_RS.shape[0],
            forward_only=forward_only,
        )

    def _step(
        self,
        micro: MicroBatch,
        chunk: Any,
        on_last_stage: Callable[[MicroBatch, TokenStats], tuple[torch.Tensor, Any]],
        forward_only: bool,
        second_moments: bool,
        head_gram: bool,
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, Any]]]:
        micro = micro.to(self.policy.device)
        shard, attention = self._attention(micro)
        routed = self.replay.of(shard, chunk, training=not forward_only) if self.replay else contextlib.nullcontext()
        with routed:
            output = chunk(
                input_ids=shard.tokens_RS,
                position_ids=shard.position_ids_RS,
                output_processor=partial(self._statistics, second_moments=second_moments, head_gram=head_gram),
                output_processor_context=shard,
                **attention,
                **self._routing(shard, chunk),
            )

        def finish(values_KRS: torch.Tensor) -> tuple[torch.Tensor, Any]:
            values = [self._on_tokens(shard, values_RS) for values_RS in values_KRS]
            names = statistics_names(second_moments, head_gram)
            return on_last_stage(micro, TokenStats(**dict(zip(names, values, strict=True))))

        return output, finish

    def _attention(self, micro: MicroBatch) -> tuple[MicroBatch, dict[str, Any]]:
        """(this rank's positions, the model's arguments that keep sequences apart)."""
        if not self.policy.packs_thd:
            return micro, {"attention_mask": attention_mask(micro.segment_ids_RS)}
        boundaries = row_boundaries(micro)
        if self.topology.cp_size > 1:
            shard = context_shard(micro, boundaries, self.topology.cp_size, self.topology.cp_rank)
        else:
            shard = micro
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=self.policy.device)
        longest = max(end - begin for begin, end in itertools.pairwise(boundaries))
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        return shard, {"attention_mask": None, "packed_seq_params": packed}

    def _routing(self, shard: MicroBatch, chunk: Any) -> dict[str, Any]:
        """Keep padding out of the balancing losses of a mixture of experts, where one is asked for."""
        provider = self.policy.provider
        if not provider.num_moe_experts or provider.moe_router_load_balancing_type == "none":
            return {}
        padding_RS = shard.segment_ids_RS == 0
        if provider.sequence_parallel and not get_attr_wrapped_model(chunk, "pre_process"):
            # GPTModel scatters the mask on the first stage only.
            padding_RS = padding_RS.chunk(self.topology.tp_size, dim=1)[self.topology.tp_rank].contiguous()
        return {"padding_mask": padding_RS}

    def _statistics(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: Any,
        output_weight: torch.Tensor | None,
        context: MicroBatch,
        second_moments: bool,
        head_gram: bool,
        **_: Any,
    ) -> torch.Tensor:
        """[2 to 5, R, S] fp32 ``statistics_names`` of the targets, from [S, R, H] hidden states (S / tp of them under SP)."""
        if self.policy.provider.sequence_parallel:
            hidden_SRH = gather_from_sequence_parallel_region(hidden_states, group=self.topology.tp_pg)
        else:
            hidden_SRH = copy_to_tensor_model_parallel_region(hidden_states, group=self.topology.tp_pg)
        weight_VH = output_layer.weight if output_weight is None else output_weight
        settings: dict[str, Any] = {
            "vocab_size": self.policy.vocab_size,
            "temperature": self.temperature,
            "chunk_tokens": self.chunk_tokens,
        }
        targets_SR, tp_pg = context.targets_RS.T, self.topology.tp_pg
        stats = linear_token_statistics(
            hidden_SRH, weight_VH, targets_SR, tp_pg, second_moments=second_moments, **settings
        )
        values = [stats.logprobs, stats.entropy, stats.sum_p2, stats.sum_p2_logp]
        if head_gram:
            assert self.topology.cp_size == 1, f"got {self.topology.cp_size} context ranks, expected whole sequences"
            values.append(head_gram_rows(hidden_SRH, weight_VH, targets_SR, trained_rows(context).T, tp_pg, **settings))
        return torch.stack([value.T for value in values if value is not None])

    def _on_tokens(self, shard: MicroBatch, values_RS: torch.Tensor) -> torch.Tensor:
        values_T = shard.token_values(values_RS)
        if self.topology.cp_size == 1:
            return values_T
        return _SumOverContext.apply(values_T, parallel_state.get_context_parallel_group())


def attention_mask(segment_ids_RS: torch.Tensor) -> torch.Tensor:
    """[R, 1, S, S] bool, True where position q (third axis) must not see position k: later, or another sequence.

    Padding is a sequence of its own, so no row of the softmax is empty.
    """
    num_positions = segment_ids_RS.shape[1]
    later_SS = torch.ones(num_positions, num_positions, dtype=torch.bool, device=segment_ids_RS.device).triu_(1)
    other_RSS = segment_ids_RS[:, :, None] != segment_ids_RS[:, None, :]
    return (other_RSS | later_SS)[:, None]


def _of_one_shape(micro: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The same with rows and columns of padding up to the largest R and S."""
    num_rows = max(len(part.tokens_RS) for part in micro)
    num_positions = max(part.tokens_RS.shape[1] for part in micro)

    def grown(part: MicroBatch) -> MicroBatch:
        rows, positions = part.tokens_RS.shape
        pad = (0, num_positions - positions, 0, num_rows - rows)
        names = [f.name for f in fields(part) if f.name.endswith("_RS")]
        fill = {"source_RS": -1}
        return replace(part, **{n: functional.pad(getattr(part, n), pad, value=fill.get(n, 0)) for n in names})

    return [grown(part) for part in micro]


class _SumOverContext(torch.autograd.Function):
    """Complete values whose tokens are spread over context-parallel ranks; each rank keeps the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, values_T: torch.Tensor, cp_pg: dist.ProcessGroup) -> torch.Tensor:
        summed_T = values_T.clone()
        dist.all_reduce(summed_T, group=cp_pg)
        return summed_T

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad_T, None

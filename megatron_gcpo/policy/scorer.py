"""Log-probabilities of a batch under a policy: the old policy's, or a frozen reference's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.config.records import TrainConfig
from megatron_gcpo.policy import pack
from megatron_gcpo.policy.forward import Forward, statistics_names
from megatron_gcpo.policy.model import Policy
from megatron_gcpo.policy.replay import Replay
from megatron_gcpo.types import TokenBatch, TokenStats


class Scorer:
    """A policy of one replica, read only. Its methods are collective and get the same batch on all ranks of the replica."""

    def __init__(
        self,
        policy: Policy,
        topology: Topology,
        train: TrainConfig,
        *,
        temperature: float,
        router_replay: bool = False,
    ) -> None:
        """temperature: of the rollouts; it divides the logits.  router_replay: follow the routing that a batch brings."""
        self.policy = policy
        self.topology = topology
        self._train = train
        self._forward = Forward(
            policy=policy,
            topology=topology,
            temperature=temperature,
            chunk_tokens=train.logits_chunk_tokens,
            replay=Replay(policy, topology) if router_replay else None,
        )

    def logprobs(self, batch: TokenBatch, *, second_moments: bool = False, head_gram: bool = False) -> TokenStats:
        """Statistics of every token, without gradient; on every rank of the replica, on the CPU.

        second_moments: whether sum p^2 and sum p^2 log p are among them; head_gram: whether the squared gradient of the
        output layer is.
        """
        micro = self._micro_batches(batch)
        self._set_training(False)
        names = statistics_names(second_moments, head_gram)

        def report(part: pack.MicroBatch, stats: TokenStats) -> tuple[torch.Tensor, torch.Tensor]:
            values_KT = torch.stack([getattr(stats, name) for name in names])
            return values_KT.new_zeros(()), values_KT

        with torch.no_grad():
            reports = self._forward.run(
                micro, report, forward_only=True, second_moments=second_moments, head_gram=head_gram
            )
        values_KT = self._on_all_stages(micro, reports, len(names), len(batch.tokens_T))
        return TokenStats(**dict(zip(names, values_KT, strict=True)))

    def _micro_batches(self, batch: TokenBatch) -> list[pack.MicroBatch]:
        """This replica's micro-batches, as many as every other replica has, empty ones at the end."""
        limits: dict[str, Any] = {
            "max_tokens": self._train.max_tokens_per_micro_batch,
            "packing": self._train.packing or self.policy.packs_thd,
            "pad_multiple": self._forward.pad_multiple,
            "sequence_multiple": self._forward.sequence_multiple,
        }
        count_1 = torch.tensor([pack.min_count(batch, **limits)])
        dist.all_reduce(count_1, dist.ReduceOp.MAX, group=self.topology.dp_cpu_pg)
        count = int(count_1)
        if len(self.policy.chunks) > 1:
            # Interleaved stages run micro-batches in rounds of the pipeline's length.
            count = -(-count // self.topology.pp_size) * self.topology.pp_size
        return pack.micro_batches(batch, **limits, rows="one" if self.policy.packs_thd else "many", count=count)

    def _on_all_stages(
        self, micro: Sequence[pack.MicroBatch], values: Sequence[torch.Tensor], num_values: int, num_tokens: int
    ) -> torch.Tensor:
        """[K, T] float32 on the CPU of every rank of the replica, from the last stage's [K, T'] of each micro-batch."""
        values_KT = torch.zeros(num_values, num_tokens, dtype=torch.float32, device=self.policy.device)
        if self.topology.is_last_stage:
            for k in range(num_values):
                values_KT[k] = pack.gather_tokens(micro, [part[k] for part in values])
        self._from_last_stage(values_KT)
        return values_KT.cpu()

    def _from_last_stage(self, values: torch.Tensor) -> None:
        """Overwrite on all pipeline stages what the last one has."""
        if self.topology.pp_size > 1:
            dist.broadcast(values, src=last_of(self.topology.pp_pg), group=self.topology.pp_pg)

    def _set_training(self, training: bool) -> None:
        for chunk in self.policy.chunks:
            chunk.train(training)


def last_of(pg: dist.ProcessGroup) -> int:
    """Global rank of a group's last member."""
    return dist.get_process_group_ranks(pg)[-1]

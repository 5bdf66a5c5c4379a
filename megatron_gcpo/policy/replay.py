"""Routing replay (R3, arXiv 2510.11370): each token goes to the experts that the rollout engine sent it to.

A router's choice jumps when its scores barely differ, so the small numerical differences between engine and trainer send
some tokens to other experts, and their log-probabilities far apart. With replay the trainer takes over the engine's
choice in every pass (old, reference and current log-probabilities) and computes the weights of the chosen experts from
its own router's scores, so that gradients reach the router. Tokens whose routing is unknown follow the trainer's router.

Megatron-Core's top-k asks ``router.router_replay`` for the choice when there is one; the objects here stand there. Core's
own class of that purpose replays a whole pass at a time; here every micro-batch brings its own choice, also when a
pipeline interleaves micro-batches and when activations are recomputed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.policy.model import Policy, unwrapped
from megatron_gcpo.policy.pack import MicroBatch

UNKNOWN = -1


class Replay:
    """The replay of one policy; stays connected to its routers, and changes nothing while a batch brings no routing."""

    def __init__(self, policy: Policy, topology: Topology) -> None:
        """Raises ValueError when the policy's routers do not choose experts by a plain top-k."""
        provider = policy.provider
        if not provider.num_moe_experts:
            raise ValueError("rollout.router_replay needs a mixture of experts: set rollout.router_replay: false")
        if provider.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing"):
            raise ValueError(
                "rollout.router_replay cannot replace the choice of a router balanced by "
                f"{provider.moe_router_load_balancing_type}: set model.megatron.moe_router_load_balancing_type to none, "
                "aux_loss, seq_aux_loss or global_aux_loss"
            )
        provider.moe_router_fusion = False  # the fused kernel chooses and weighs in one go
        self._sequence_shards = topology.tp_size if provider.sequence_parallel else 1
        self._shard = topology.tp_rank
        self._world_pg = topology.world_cpu_pg
        self._shape = (provider.num_layers, provider.moe_router_topk)
        self._layers: dict[Any, list[_Layer]] = {}
        for chunk, module in zip(policy.chunks, unwrapped(policy), strict=True):
            routers = [m for m in module.modules() if isinstance(m, TopKRouter) and not m.is_mtp_layer]
            self._layers[chunk] = [_Layer(cast(int, router.layer_number) - 1) for router in routers]
            for router, layer in zip(routers, self._layers[chunk], strict=True):
                router.router_replay = layer  # type: ignore[assignment]

    @contextmanager
    def of(self, shard: MicroBatch, chunk: Any, *, training: bool) -> Iterator[None]:
        """While ``chunk`` computes these positions of a micro-batch its routers follow the batch's routing.

        training: a backward pass follows, which may compute layers again and then finds the routing here.
        """
        layers = self._layers[chunk]
        experts_NLk = self._experts(shard)
        for layer in layers:
            layer.begin(None if experts_NLk is None else experts_NLk[:, layer.index], training=training)
        try:
            yield
        finally:
            for layer in layers:
                layer.end()

    def agreement(self) -> dict[str, float]:
        """Share of the replayed expert ids that the trainer's routers would have chosen too, since the last call.

        Over all tokens with known routing, layers and ranks of the training passes; empty without any. Collective.
        """
        layers = [layer for layers in self._layers.values() for layer in layers]
        counts_2 = torch.zeros(2, dtype=torch.float64)
        for layer in layers:
            assert not layer.waiting, f"got {len(layer.waiting)} micro-batches without a second forward, expected none"
            counts_2 += layer.take_counts()
        dist.all_reduce(counts_2, group=self._world_pg)
        agreed, replayed = counts_2.tolist()
        return {"router_agreement": agreed / replayed} if replayed else {}

    def _experts(self, shard: MicroBatch) -> torch.Tensor | None:
        """[N, layers, k] int64 of the N positions that this rank's routers see, in their order; -1 where unknown."""
        experts_TLk = shard.batch.routed_experts_T
        if experts_TLk is None or not len(experts_TLk):
            return None
        assert experts_TLk.shape[1:] == self._shape, (
            f"got routing of {tuple(experts_TLk.shape[1:])} (layers, k), expected the model's {self._shape}"
        )
        # A position holds the token before the one it predicts; the last of a sequence predicts none, and nothing that
        # is trained looks at it.
        known_RS = shard.source_RS > 0
        experts_RSLk = experts_TLk[(shard.source_RS - 1).clamp(min=0)]
        experts_RSLk = torch.where(known_RS[..., None, None], experts_RSLk, UNKNOWN)
        experts_SRLk = experts_RSLk.transpose(0, 1).chunk(self._sequence_shards, dim=0)[
            self._shard if self._sequence_shards > 1 else 0
        ]
        return experts_SRLk.flatten(0, 1).long()


class _Layer:
    """Stands in ``router.router_replay`` of one router."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.layer_number = index + 1  # core's name for it
        self.waiting: deque[torch.Tensor | None] = deque()
        """Routing of micro-batches whose activations were not kept, in the order in which they are computed again."""
        self._inside = False
        self._training = False
        self._experts_Nk: torch.Tensor | None = None
        self._counts_2 = torch.zeros(2, dtype=torch.float64)

    def begin(self, experts_Nk: torch.Tensor | None, *, training: bool) -> None:
        self._inside, self._training, self._experts_Nk = True, training, experts_Nk

    def end(self) -> None:
        self._inside, self._experts_Nk = False, None

    def take_counts(self) -> torch.Tensor:
        """[agreed, replayed] since the last call, on the CPU."""
        counts_2, self._counts_2 = self._counts_2.cpu(), torch.zeros(2, dtype=torch.float64)
        return counts_2

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by core: (scores [N, k] of the chosen experts, their ids [N, k])."""
        own_scores_Nk, own_Nk = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts_Nk = self._now()
        if experts_Nk is None:
            return own_scores_Nk, own_Nk
        known_N1 = experts_Nk[:, :1] != UNKNOWN
        chosen_Nk = torch.where(known_N1, experts_Nk, own_Nk)
        if self._inside and self._training:
            agreed_Nk = (chosen_Nk[:, :, None] == own_Nk[:, None, :]).any(-1) & known_N1
            counts_2 = torch.stack([agreed_Nk.sum(), known_N1.sum() * topk])
            self._counts_2 = self._counts_2.to(counts_2.device) + counts_2
        return scores.gather(1, chosen_Nk), chosen_Nk

    def _now(self) -> torch.Tensor | None:
        if not self._inside:
            # a backward pass, which takes micro-batches in the order of their forward passes; or a pass without replay
            return self.waiting.popleft() if self.waiting else None
        if self._training and not torch.is_grad_enabled():
            self.waiting.append(self._experts_Nk)
        return self._experts_Nk

"""How losses add up: the only place with data-parallel, context-parallel and micro-batch constants."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
import torch.distributed as dist

from megatron_gcpo.loss.reduce import Totals, count, token_weights
from megatron_gcpo.types import TokenBatch


def weights(batch: TokenBatch, mode: str, max_tokens: int, dp_group: dist.ProcessGroup | None) -> TokenBatch:
    """The replica's batch with ``weights_T``, such that sum(weights * token loss) over all replicas is the loss.

    mode, max_tokens: see loss.reduce.token_weights, whose errors these are. dp_group: the data-parallel group without
    context parallelism (its ranks hold different batches; the ranks of one replica the same); None: this batch is the
    global one. Collective over dp_group.
    """
    totals = global_totals(count(batch), dp_group)
    return replace(batch, weights_T=token_weights(batch, totals, mode, max_tokens))


def global_totals(own: Totals, dp_group: dist.ProcessGroup | None) -> Totals:
    """The sum of every replica's totals. Collective over dp_group."""
    if dp_group is None or dp_group.size() == 1:
        return own
    names = [f.name for f in fields(Totals)]
    device = "cuda" if dist.get_backend(dp_group) == dist.Backend.NCCL else "cpu"
    counts = torch.tensor([getattr(own, name) for name in names], dtype=torch.int64, device=device)
    dist.all_reduce(counts, group=dp_group)
    return Totals(**dict(zip(names, counts.tolist(), strict=True)))


def loss_factor(num_microbatches: int, dp_size: int, cp_size: int, *, calculate_per_token_loss: bool = False) -> float:
    """What a micro-batch's sum(weights * loss) is multiplied by so that the gradient is that of the global sum.

    Holds for Megatron-Core 0.19.2 with a loss function that returns (loss, report), where every rank's loss counts each
    token of the micro-batch once. dp_size: replicas (without context parallelism). Derived by following the gradient g
    of one micro-batch's weighted sum, times f, through core:

    1. schedules.forward_step_calc_loss multiplies the loss of a two-element result by cp_size and divides it by
       num_microbatches, whatever calculate_per_token_loss is:                           f g cp / M
    2. gradients of the M micro-batches accumulate in main_grad (no constant).
    3. On each of the dp cp ranks the backward pass reaches only the activations of that rank's own positions, so the
       sum over the cp ranks of a replica is g, once (pack.MicroBatch.token_values completes values across ranks with an
       identity backward; a loss of the own positions alone would give the same).
    4. DistributedDataParallel with calculate_per_token_loss=False multiplies by 1 / (dp cp) and sums over the dp cp
       ranks (average_in_collective does the same in one collective; expert parameters sum over fewer ranks, each of
       which has seen the tokens of its whole expert-parallel group, with the same factor):  f cp / (M dp cp) sum g
       With calculate_per_token_loss=True it only sums:                                     f cp / M sum g
    5. finalize_model_grads divides by the number of tokens that the loss function returned, at least 1, when
       calculate_per_token_loss=True. A two-element result returns none: division by 1.

    Hence f = M dp (cp cancels), or M / cp with calculate_per_token_loss=True.

    Auxiliary losses of mixture-of-experts routers take another road: core sets MoEAuxLossAutoScaler to cp / M itself,
    so that with calculate_per_token_loss=False they are averaged over micro-batches and replicas, whatever f is, as
    their coefficients are meant. With True the router multiplies them by token counts that only step 5 would
    divide out again: then leave it False, or set config.moe_grad_scale_func to 1 / global tokens. Padding (and
    empty micro-batches) must be kept out of the router by GPTModel's padding_mask.
    """
    return num_microbatches / cp_size if calculate_per_token_loss else float(num_microbatches * dp_size)

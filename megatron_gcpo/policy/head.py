"""The gradient of a sequence's log-likelihood with respect to the output layer, as its squared norm: no backward pass.

With h_t the hidden state, z_t = W h_t / temperature and p_t = softmax z_t, the gradient of sum_t log p_t(y_t) is
-sum_t d_t h_t^T, d_t = (p_t - e_{y_t}) / temperature, and

    || sum_t d_t h_t^T ||^2 = sum_t q_t,     q_t = sum_s (d_s . d_t)(h_s . h_t)                          (derived)

over the trained tokens of the sequence: two Gram matrices, whose memory does not grow with vocabulary x hidden size. The
vocabulary is spread over the tensor-parallel ranks and d_s . d_t is a sum over it, so every rank adds up its own columns,
and one SUM all-reduce of [T] completes q.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_gcpo.policy.vocab import Shard


@torch.no_grad()
def head_gram_rows(
    hidden: torch.Tensor,
    weight_VH: torch.Tensor,
    targets: torch.Tensor,
    rows: torch.Tensor,
    tp_group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_tokens: int = 2048,
) -> torch.Tensor:
    """[..] fp32 (float64 for float64 hidden states): q_t of every position, 0 where ``rows`` is negative.

    hidden: [.., H] the same on every rank.  weight_VH: [V / tp, H] this rank's rows of the output layer.
    targets, rows: [..] int64 token that each position predicts, and the sequence it is trained in; -1: not trained.
    vocab_size, temperature, chunk_tokens: as in policy.vocab; residuals of two chunks exist at once. Sequences longer
    than a chunk compute theirs anew for each pair of chunks.

    Collective over ``tp_group``; every rank returns the same values. ValueErrors of policy.vocab.
    """
    assert targets.shape == rows.shape == hidden.shape[:-1], f"got {targets.shape}, {rows.shape}, {hidden.shape}"
    shard = Shard.of(weight_VH.shape[0], vocab_size, tp_group, temperature, chunk_tokens)
    hidden_TH, targets_T, rows_T = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), rows.reshape(-1)
    exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    gram_T = torch.zeros(len(rows_T), dtype=exact, device=hidden.device)
    for row in rows_T[rows_T >= 0].unique().tolist():
        own = (rows_T == row).nonzero()[:, 0]
        blocks = [own[c] for c in shard.chunks(len(own))]
        for i, left in enumerate(blocks):
            d_left = _residuals(hidden_TH[left], weight_VH, targets_T[left], shard)
            for j in range(i, len(blocks)):
                right = blocks[j]
                d_right = d_left if j == i else _residuals(hidden_TH[right], weight_VH, targets_T[right], shard)
                pairs = (d_left @ d_right.T) * (hidden_TH[left].to(exact) @ hidden_TH[right].to(exact).T)
                gram_T[left] += pairs.sum(1)
                if j != i:
                    gram_T[right] += pairs.sum(0)
    if shard.pg is not None:
        dist.all_reduce(gram_T, group=shard.pg)
    return gram_T.view(rows.shape)


def _residuals(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, targets_T: torch.Tensor, shard: Shard) -> torch.Tensor:
    """[T, V / tp] this rank's columns of (p - e_y) / temperature."""
    z_TV = shard.scaled(hidden_TH @ weight_VH.T)
    max_T = z_TV.amax(-1) if shard.size else z_TV.new_full((len(z_TV),), -torch.inf)
    if shard.pg is not None:
        dist.all_reduce(max_T, dist.ReduceOp.MAX, group=shard.pg)
    e_TV = z_TV.sub_(max_T[:, None]).exp_()
    total_T = e_TV.sum(-1)
    if shard.pg is not None:
        dist.all_reduce(total_T, group=shard.pg)
    d_TV = e_TV.div_(total_T[:, None])
    if shard.size:
        column_T, here_T = shard.columns(targets_T)
        d_TV.scatter_add_(1, column_T[:, None], -here_T[:, None].to(d_TV.dtype))
    return d_TV.div_(shard.temperature)

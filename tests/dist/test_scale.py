"""Weights and gradients of a global batch do not depend on how replicas, context ranks and micro-batches share it.

A toy policy (one vector theta, value of token t = theta . x_t) runs through Megatron-Core's own schedule, distributed
data parallelism and finalize_model_grads; the expected gradient is autograd's, on all sequences at once.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_gcpo.cluster import launch
from megatron_gcpo.loss.reduce import Totals, count, token_weights
from megatron_gcpo.policy.scale import global_totals, loss_factor, weights
from megatron_gcpo.types import TokenBatch
from tests.dist.harness import run_ranks

LENGTHS = (5, 3, 6, 2, 4, 7, 3, 5)
H = 4


def global_batch():
    g = torch.Generator().manual_seed(0)
    T = sum(LENGTHS)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    mask = torch.ones(T)
    mask[cu[:-1]] = 0
    return TokenBatch(
        tokens_T=torch.arange(T),
        cu_seqlens_N1=cu,
        mask_T=mask,
        advantages_T=torch.randn(T, generator=g) * mask,
        group_N=torch.arange(len(LENGTHS)) // 2,
    )


def features(batch):
    """[T, H] float64, a function of the token alone."""
    return torch.sin(batch.tokens_T[:, None] * torch.arange(1.0, H + 1, dtype=torch.float64))


def total_loss(batch, values_T):
    """sum(weights * loss), where the loss of a token depends on its whole sequence (as a sequence-level ratio does)."""
    row_T = torch.arange(batch.num_rows).repeat_interleave(batch.lengths_N)
    mean_N = torch.zeros(batch.num_rows, dtype=values_T.dtype).index_add(0, row_T, values_T) / batch.lengths_N
    return (batch.weights_T * batch.advantages_T * (mean_N[row_T].exp() + values_T**2)).sum()


class SumForward(torch.autograd.Function):
    """All-reduce whose backward is the identity: each rank's part is completed, each learns from its own part."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def check_weights(rank):
    batch = global_batch()
    half = batch.rows([[0, 1, 2, 3, 4, 5], [6, 7]][rank])
    assert global_totals(count(half), dist.group.WORLD) == count(batch)
    assert global_totals(count(half), None) == count(half) != count(batch)
    for mode in ("token_mean", "sequence_mean_token_mean", "sequence_mean_fixed_length", "prompt_balanced"):
        whole = weights(batch, mode, 16, None).weights_T
        mine = weights(half, mode, 16, dist.group.WORLD).weights_T
        torch.testing.assert_close(mine, whole[: len(mine)] if rank == 0 else whole[-len(mine) :])
    empty = global_totals(count(batch.rows([])) if rank else count(half), dist.group.WORLD)
    assert empty == Totals(num_tokens=sum(LENGTHS[:6]) - 6, num_rows=6, num_groups=3)


def check_gradient(rank, cp_size, per_token):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import MegatronModule, TransformerConfig

    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    dp_size = parallel_state.get_data_parallel_world_size()
    assert (cp_size, dp_size) in ((1, 2), (2, 1))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=1,
        use_cpu_initialization=True,
        calculate_per_token_loss=per_token,
        finalize_model_grads_func=finalize_model_grads,
        context_parallel_size=cp_size,
    )

    class Toy(MegatronModule):
        model_type = ModelType.encoder_or_decoder

        def __init__(self):
            super().__init__(config)
            self.theta = torch.nn.Parameter(torch.linspace(-0.3, 0.5, H))

        def set_input_tensor(self, tensors):
            pass

        def forward(self, x):
            return x @ self.theta.double()

    whole = global_batch()
    whole = weights(whole, "token_mean", 16, None)
    parts = [whole.rows(rows) for rows in ([0, 1], [2], [3, 4, 5], [], [6], [7])]
    if dp_size == 2:
        parts = parts[3 * rank : 3 * rank + 3]
    M = len(parts)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=False), Toy())

    def forward_step(batches, model):
        batch = next(batches)
        mine_T = torch.arange(len(batch.tokens_T)) % cp_size == rank % cp_size
        partial_T = torch.where(mine_T, model(features(batch)), 0)
        values_T = SumForward.apply(partial_T, parallel_state.get_context_parallel_group())
        factor = loss_factor(M, dp_size, cp_size, calculate_per_token_loss=per_token)
        return values_T, lambda values: (factor * total_loss(batch, values), {})

    ddp.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(parts),
        model=[ddp],
        num_microbatches=M,
        seq_length=1,
        micro_batch_size=1,
    )
    theta = torch.linspace(-0.3, 0.5, H).requires_grad_()
    total_loss(whole, features(whole) @ theta.double()).backward()
    torch.testing.assert_close(ddp.module.theta.main_grad, theta.grad, rtol=1e-5, atol=1e-7)
    parallel_state.destroy_model_parallel()


def work():
    from megatron_gcpo.cluster.platform import install

    install("cpu")
    env = launch.worker_env()
    store = launch.connect(env, timedelta(seconds=60))
    dist.init_process_group("gloo", store=dist.PrefixStore("scale", store), rank=env.rank, world_size=2)
    check_weights(env.rank)
    for cp_size in (1, 2):
        for per_token in (False, True):
            check_gradient(env.rank, cp_size, per_token)
    dist.destroy_process_group()


def test_global_weights_and_gradients(tmp_path):
    run_ranks(__file__, "work", 2, {}, tmp_path)


def test_weights_of_one_replica_need_no_group():
    batch = global_batch()
    weighted = weights(batch, "token_mean", 16, None)
    assert torch.equal(weighted.weights_T, token_weights(batch, count(batch), "token_mean", 16))
    torch.testing.assert_close(weighted.weights_T.sum(), torch.tensor(1.0))
    assert batch.weights_T is None

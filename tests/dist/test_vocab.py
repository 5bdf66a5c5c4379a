"""Two ranks that hold half of the vocabulary each say and learn what one rank with all of it does."""

import torch
import torch.distributed as dist

from megatron_gcpo.cluster import platform as platforms
from megatron_gcpo.cluster import topology as topologies
from megatron_gcpo.config.records import ClusterConfig
from megatron_gcpo.policy.head import head_gram_rows
from megatron_gcpo.policy.vocab import linear_token_statistics, token_statistics
from tests.dist.harness import run_ranks

STATS = ("logprobs", "entropy", "sum_p2", "sum_p2_logp")
T, WIDTH, HIDDEN, CHUNK = 11, 8, 5, 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
VOCAB_SIZES = (16, 13, 8, 3)
"""All true; rank 1 partly padded; rank 1 all padding; rank 0 partly padded as well."""


def case(dtype, vocab_size):
    g = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(T, HIDDEN, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(2 * WIDTH, HIDDEN, generator=g, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, vocab_size, (T,), generator=g)
    coefficients = torch.randn(len(STATS), T, generator=g, dtype=torch.float64).to(dtype)
    return hidden, weight, targets, coefficients


def weighted(stats, coefficients):
    return sum((getattr(stats, name) * c).sum() for name, c in zip(STATS, coefficients, strict=True))


def assert_equal(got, expected, dtype):
    torch.testing.assert_close(got, expected, rtol=10 * TOLERANCE[dtype], atol=TOLERANCE[dtype])


def check_logits(rank, dtype, vocab_size, options):
    hidden, weight, targets, coefficients = case(dtype, vocab_size)
    whole = (4 * hidden @ weight.T).requires_grad_()
    mine = whole.detach()[:, rank * WIDTH : (rank + 1) * WIDTH].clone().requires_grad_()
    one = token_statistics(whole, targets, **options)
    two = token_statistics(mine, targets, dist.group.WORLD, **options)
    for name in STATS:
        assert_equal(getattr(two, name), getattr(one, name), dtype)
    weighted(one, coefficients).backward()
    weighted(two, coefficients).backward()
    assert_equal(mine.grad, whole.grad[:, rank * WIDTH : (rank + 1) * WIDTH], dtype)
    everyone = [torch.empty_like(two.logprobs) for _ in range(2)]
    dist.all_gather(everyone, two.logprobs.detach())
    assert torch.equal(everyone[0], everyone[1])


def check_linear(rank, dtype, vocab_size, options):
    hidden, weight, targets, coefficients = case(dtype, vocab_size)
    h1, w1, h2 = (t.clone().requires_grad_() for t in (hidden, weight, hidden))
    w2 = weight[rank * WIDTH : (rank + 1) * WIDTH].clone().requires_grad_()
    weighted(linear_token_statistics(h1, w1, targets, **options), coefficients).backward()
    weighted(linear_token_statistics(h2, w2, targets, dist.group.WORLD, **options), coefficients).backward()
    assert_equal(w2.grad, w1.grad[rank * WIDTH : (rank + 1) * WIDTH], dtype)
    dist.all_reduce(h2.grad)
    assert_equal(h2.grad, h1.grad, dtype)


def check_head_gram(rank, dtype, vocab_size, options):
    hidden, weight, targets, _ = case(dtype, vocab_size)
    rows = torch.tensor([0] * 6 + [-1] + [1] * (T - 7))
    own = weight[rank * WIDTH : (rank + 1) * WIDTH]
    one = head_gram_rows(hidden, weight, targets, rows, **options)
    two = head_gram_rows(hidden, own, targets, rows, dist.group.WORLD, **options)
    assert_equal(two, one, dtype)


def check_communication(rank, options):
    """One MAX and one SUM of a few numbers per token and chunk, none in the backward pass."""
    logits = torch.randn(T, WIDTH, requires_grad=True)
    calls = []
    original = dist.all_reduce

    def recorded(tensor, op=dist.ReduceOp.SUM, group=None):
        calls.append((str(op).rsplit(".", 1)[-1], tensor.numel()))
        return original(tensor, op, group=group)

    dist.all_reduce = recorded
    try:
        stats = token_statistics(logits, torch.zeros(T, dtype=torch.int64), dist.group.WORLD, **options)
        weighted(stats, torch.ones(len(STATS), T)).backward()
    finally:
        dist.all_reduce = original
    assert calls == [(op, n * k) for n in (4, 4, 3) for op, k in (("MAX", 1), ("SUM", 5))], calls


def work():
    topology = topologies.init(ClusterConfig(platform="cpu", processes_per_node=2), platforms.install("cpu"))
    for vocab_size in VOCAB_SIZES:
        options = {"vocab_size": vocab_size, "temperature": 0.7, "chunk_tokens": CHUNK, "second_moments": True}
        for dtype in TOLERANCE:
            check_logits(topology.rank, dtype, vocab_size, options)
            check_linear(topology.rank, dtype, vocab_size, options)
            plain = {name: value for name, value in options.items() if name != "second_moments"}
            check_head_gram(topology.rank, dtype, vocab_size, plain)
    check_communication(topology.rank, options)
    topology.close()


def test_two_ranks_equal_one(tmp_path):
    run_ranks(__file__, "work", 2, {}, tmp_path)

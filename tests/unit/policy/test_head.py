"""The squared gradient of the output layer against autograd."""

from __future__ import annotations

import pytest
import torch

from megatron_gcpo.policy.head import head_gram_rows

V, H = 13, 5


def case(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weights with two padded rows, targets and rows; a position in three is not trained."""
    g = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rows[::3] = -1
    hidden = torch.randn(count, H, generator=g).double()
    return hidden, torch.randn(V + 2, H, generator=g).double(), torch.randint(0, V, (count,), generator=g), rows


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_row_sums_are_the_squared_gradients_of_autograd(chunk, temperature):
    hidden, weight, targets, rows = case([7, 1, 12])
    got = head_gram_rows(hidden, weight, targets, rows, vocab_size=V, temperature=temperature, chunk_tokens=chunk)
    assert (got[rows < 0] == 0).all()
    for row in range(3):
        own = rows == row
        w = weight.clone().requires_grad_()
        logp = (hidden[own] @ w[:V].T / temperature).log_softmax(-1).gather(1, targets[own][:, None])
        (gradient,) = torch.autograd.grad(logp.sum(), w)
        torch.testing.assert_close(got[own].sum(), gradient.square().sum(), rtol=1e-12, atol=1e-12)


def test_shape_of_a_micro_batch_is_kept():
    """[S, R, H] positions in any order of sequences give what the flat ones do."""
    hidden, weight, targets, rows = case([6, 6])
    flat = head_gram_rows(hidden, weight, targets, rows, vocab_size=V)
    order = torch.arange(12).view(2, 6).T
    shaped = head_gram_rows(hidden[order], weight, targets[order], rows[order], vocab_size=V)
    torch.testing.assert_close(shaped, flat[order])


def test_the_root_of_length_undoes_the_mean():
    """Independent tokens: ||mean of T gradients|| falls as 1 / sqrt(T), so sqrt(T) ||g|| does not depend on T."""
    scores = []
    for length in (8, 32, 128):
        means = []
        for seed in range(40):
            g = torch.Generator().manual_seed(seed)
            hidden = torch.randn(length, H, generator=g)
            targets = torch.randint(0, V, (length,), generator=g)
            rows = torch.zeros(length, dtype=torch.int64)
            # a policy that knows nothing, and targets it would draw: gradients of mean 0
            total = head_gram_rows(hidden, torch.zeros(V, H), targets, rows, vocab_size=V).sum()
            means.append((total / length).sqrt())
        scores.append(torch.stack(means).mean().item())
    assert max(scores) / min(scores) < 1.1

import pytest
import torch
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gcpo.policy.vocab import linear_token_statistics, token_statistics

STATS = ("logprobs", "entropy", "sum_p2", "sum_p2_logp")


def random_case(T=13, V=17, dtype=torch.float64, seed=0, scale=3.0):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(T, V, generator=g, dtype=torch.float64) * scale).to(dtype)
    return logits, torch.randint(0, V, (T,), generator=g)


def reference(logits, targets, temperature=1.0):
    """The four statistics from torch's own distribution, by definition."""
    d = Categorical(logits=logits / temperature)
    p, l = d.probs, d.logits
    return d.log_prob(targets), d.entropy(), (p**2).sum(-1), (p**2 * l).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_values_and_gradients_equal_torch(temperature):
    logits, targets = random_case()
    mine = logits.clone().requires_grad_()
    other = logits.clone().requires_grad_()
    stats = token_statistics(mine, targets, vocab_size=17, temperature=temperature, chunk_tokens=4, second_moments=True)
    expected = reference(other, targets, temperature)
    coefficients = torch.randn(4, 13, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name, value, coefficient in zip(STATS, expected, coefficients, strict=True):
        torch.testing.assert_close(getattr(stats, name), value, rtol=1e-12, atol=1e-12)
        grad = torch.autograd.grad((getattr(stats, name) * coefficient).sum(), mine, retain_graph=True)
        torch.testing.assert_close(
            grad, torch.autograd.grad((value * coefficient).sum(), other, retain_graph=True), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("vocab_size", [7, 5])
def test_gradcheck(vocab_size):
    logits, targets = random_case(T=5, V=7, scale=1.5)
    targets %= vocab_size

    def run(z):
        s = token_statistics(z, targets, vocab_size=vocab_size, temperature=0.8, chunk_tokens=2, second_moments=True)
        return tuple(getattr(s, name) for name in STATS)

    assert torch.autograd.gradcheck(run, (logits.requires_grad_(),))


def test_gradcheck_linear():
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 3, 4, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 4, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 7, (2, 3), generator=g)

    def run(h, w):
        s = linear_token_statistics(h, w, targets, vocab_size=7, temperature=1.3, chunk_tokens=4, second_moments=True)
        return tuple(getattr(s, name) for name in STATS)

    assert torch.autograd.gradcheck(run, (hidden, weight))


def test_linear_equals_projecting_first():
    g = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(11, 6, generator=g), torch.randn(20, 6, generator=g)
    targets = torch.randint(0, 18, (11,), generator=g)
    h1, w1, h2, w2 = (t.clone().requires_grad_() for t in (hidden, weight, hidden, weight))
    a = linear_token_statistics(h1, w1, targets, vocab_size=18, temperature=0.9, chunk_tokens=3)
    b = token_statistics(h2 @ w2.T, targets, vocab_size=18, temperature=0.9, chunk_tokens=100)
    torch.testing.assert_close(a.logprobs, b.logprobs)
    torch.testing.assert_close(a.entropy, b.entropy)
    (a.logprobs.sum() + 0.3 * a.entropy.sum()).backward()
    (b.logprobs.sum() + 0.3 * b.entropy.sum()).backward()
    torch.testing.assert_close(h1.grad, h2.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(w1.grad, w2.grad, rtol=1e-5, atol=1e-6)


def test_padded_ids_take_no_part():
    logits, targets = random_case(V=17)
    targets %= 12
    padded = logits.clone()
    padded[:, 12:] = 1e6  # would take all the mass
    padded.requires_grad_()
    stats = token_statistics(padded, targets, vocab_size=12, second_moments=True)
    for name, value in zip(STATS, reference(logits[:, :12], targets), strict=True):
        torch.testing.assert_close(getattr(stats, name), value)
    (stats.logprobs.sum() + stats.entropy.sum()).backward()
    assert (padded.grad[:, 12:] == 0).all()
    assert (padded.grad[:, :12] != 0).any()


def test_a_target_outside_the_vocabulary_has_no_probability():
    logits, _ = random_case(T=3, V=8)
    stats = token_statistics(logits, torch.tensor([2, 6, 7]), vocab_size=7)
    assert stats.logprobs[:2].isfinite().all()
    assert stats.logprobs[2] == -torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1.0, 1e4])
def test_extreme_logits(dtype, size):
    """All equal, ordinary and +-1e4: compared with float64 on the very same rounded logits."""
    g = torch.Generator().manual_seed(5)
    signs = torch.randint(0, 2, (6, 50), generator=g) * 2.0 - 1
    logits = (signs * size).to(dtype).requires_grad_()
    targets = torch.randint(0, 50, (6,), generator=g)
    stats = token_statistics(logits, targets, vocab_size=50, temperature=0.5, second_moments=True)
    exact = logits.detach().double().requires_grad_()
    expected = reference(exact, targets, 0.5)
    for name, value in zip(STATS, expected, strict=True):
        assert getattr(stats, name).dtype == torch.float32
        torch.testing.assert_close(getattr(stats, name).double(), value, rtol=2e-6, atol=2e-6)
    (stats.logprobs - 0.1 * stats.entropy + stats.sum_p2).sum().backward()
    (expected[0] - 0.1 * expected[1] + expected[2]).sum().backward()
    assert logits.grad.dtype == dtype
    assert logits.grad.isfinite().all()
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=1e-6)


def test_forbidden_tokens_are_minus_infinity_and_harmless():
    """-inf logits (a mask) equal a smaller vocabulary: entropy and gradients stay finite."""
    logits, targets = random_case(V=9)
    targets %= 6
    masked = logits.clone()
    masked[:, 6:] = -torch.inf
    masked.requires_grad_()
    small = logits[:, :6].clone().requires_grad_()
    a = token_statistics(masked, targets, vocab_size=9)
    b = token_statistics(small, targets, vocab_size=6)
    torch.testing.assert_close(a.entropy, b.entropy)
    (a.logprobs + 1e3 * a.entropy).sum().backward()
    (b.logprobs + 1e3 * b.entropy).sum().backward()
    torch.testing.assert_close(masked.grad[:, :6], small.grad)
    assert (masked.grad[:, 6:] == 0).all()


def test_nan_is_not_hidden():
    logits, targets = random_case(T=3)
    logits[1, 4] = torch.nan
    stats = token_statistics(logits, targets, vocab_size=17)
    assert stats.logprobs.isnan().tolist() == [False, True, False]


def test_chunks_do_not_matter():
    for dtype in (torch.float32, torch.bfloat16):
        logits, targets = random_case(T=37, V=300, dtype=dtype)
        whole = logits.clone().requires_grad_()
        a = token_statistics(whole, targets, vocab_size=290, chunk_tokens=1000)
        (a.logprobs + a.entropy).sum().backward()
        for chunk in (1, 5, 37):
            cut = logits.clone().requires_grad_()
            b = token_statistics(cut, targets, vocab_size=290, chunk_tokens=chunk)
            (b.logprobs + b.entropy).sum().backward()
            assert torch.equal(a.logprobs, b.logprobs)
            assert torch.equal(a.entropy, b.entropy)
            assert torch.equal(whole.grad, cut.grad)


def test_shapes_follow_the_targets():
    logits, targets = random_case(T=12)
    flat = token_statistics(logits, targets, vocab_size=17)
    shaped = token_statistics(logits.view(3, 4, 17).transpose(0, 1), targets.view(3, 4).T, vocab_size=17)
    torch.testing.assert_close(shaped.logprobs.T.reshape(-1), flat.logprobs)
    assert shaped.entropy.shape == (4, 3)
    empty = token_statistics(logits[:0].requires_grad_(), targets[:0], vocab_size=17)
    empty.logprobs.sum().backward()
    assert empty.entropy.shape == (0,)


def test_logprobs_are_those_of_the_sampler():
    """Sampling from softmax(logits / temperature): frequencies meet exp(logprobs) within 5 standard errors."""
    g = torch.Generator().manual_seed(6)
    logits = torch.randn(6, generator=g) * 2
    n = 40_000
    drawn = torch.multinomial(torch.softmax(logits / 0.7, -1), n, replacement=True, generator=g)
    frequency = torch.bincount(drawn, minlength=6) / n
    p = token_statistics(logits.expand(6, 6), torch.arange(6), vocab_size=6, temperature=0.7).logprobs.exp()
    assert ((frequency - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 1e-9).all()


class LargestTensor(TorchDispatchMode):
    """Remembers the largest fp32 tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.dtype == torch.float32:
                self.numel = max(self.numel, t.numel())
        return out


def test_working_memory_is_one_chunk():
    """No fp32 tensor, saved or passing, is larger than chunk x V; for the fused form no tensor of any type."""
    T, V, chunk = 64, 100, 8
    logits, targets = random_case(T=T, V=V, dtype=torch.bfloat16)
    logits.requires_grad_()
    saved = []
    with (
        LargestTensor() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        stats = token_statistics(logits, targets, vocab_size=V, chunk_tokens=chunk)
        (stats.logprobs + stats.entropy).sum().backward()
    assert largest.numel == chunk * V
    assert [t.data_ptr() for t in saved if t.numel() >= T * V] == [logits.data_ptr()]

    hidden, weight = torch.randn(T, 4, requires_grad=True), torch.randn(V, 4, requires_grad=True)
    with LargestTensor() as largest:
        stats = linear_token_statistics(hidden, weight, targets, vocab_size=V, chunk_tokens=chunk)
        (stats.logprobs + stats.entropy).sum().backward()
    assert largest.numel == chunk * V


def test_impossible_settings_name_the_field():
    logits, targets = random_case()
    with pytest.raises(ValueError, match=r"rollout\.temperature"):
        token_statistics(logits, targets, vocab_size=17, temperature=0.0)
    with pytest.raises(ValueError, match=r"train\.logits_chunk_tokens"):
        token_statistics(logits, targets, vocab_size=17, chunk_tokens=0)

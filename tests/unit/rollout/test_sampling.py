import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron_gcpo.rollout.engine import Sampling
from megatron_gcpo.rollout.sampling import BLOCK_TOKENS, UniformStreams, draw, sampling_logprobs

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 10, 50]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_distribution_is_that_of_the_transformers_warpers(seed, temperature, top_k, top_p, min_p):
    logits_NV = torch.randn(4, 20, generator=torch.Generator().manual_seed(seed)) * 3
    expected = logits_NV / temperature
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = sampling_logprobs(logits_NV, sampling)
    torch.testing.assert_close(got, expected.log_softmax(-1), atol=1e-5, rtol=1e-5)


def test_of_equal_logits_exactly_top_k_survive():
    logprobs_NV = sampling_logprobs(torch.zeros(1, 6), Sampling(top_k=2))
    assert int(logprobs_NV.isfinite().sum()) == 2
    torch.testing.assert_close(logprobs_NV.exp().sum(), torch.tensor(1.0))


def test_evenly_spread_uniforms_draw_every_token_in_proportion():
    """The inverse of the cumulative distribution maps n evenly spread numbers to counts within 1 of n p (derived)."""
    probs_V = torch.tensor([0.05, 0.0, 0.4, 0.3, 0.0, 0.25, 0.0])
    n = 1000
    tokens_N, logprobs_N = draw(probs_V.log().expand(n, -1), (torch.arange(n, dtype=torch.float64) + 0.5) / n)
    counts = torch.bincount(tokens_N, minlength=7)
    assert (counts - n * probs_V).abs().max() <= 1
    torch.testing.assert_close(logprobs_N, probs_V.log()[tokens_N])


def test_the_extremes_never_draw_a_token_without_probability():
    logprobs_NV = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).log().expand(2, -1)
    tokens_N, _ = draw(logprobs_NV, torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64))
    assert tokens_N.tolist() == [1, 2]


def test_streams_depend_on_their_own_seed_only_and_go_on_across_blocks():
    seeds = [7, 11, 2**63 - 1]
    streams = UniformStreams(seeds, CPU)
    expected = [np.random.Generator(np.random.Philox(key=s)).random(3 * BLOCK_TOKENS) for s in seeds]
    rows = torch.tensor([2, 0])
    for t in range(2 * BLOCK_TOKENS + 5):
        got = streams.at(t, rows)
        assert got.tolist() == [expected[2][t], expected[0][t]]


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", 0.0), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("min_p", 1.0)]
)
def test_impossible_sampling_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"rollout.{field}"):
        Sampling(**{field: value})

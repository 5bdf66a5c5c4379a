"""examples/gcpo_single_file.py and the package were written apart: on random groups each is the other's oracle."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gcpo.credit import gcpo_advantages, shapley_values, team_value
from megatron_gcpo.data import make_task
from megatron_gcpo.embed import embedded_span
from megatron_gcpo.loss.reduce import count, token_weights
from megatron_gcpo.methods import resolve
from megatron_gcpo.types import CreditInputs, TokenBatch, TokenStats


def _load() -> ModuleType:
    path = Path(__file__).parents[3] / "examples" / "gcpo_single_file.py"
    spec = importlib.util.spec_from_file_location("gcpo_single_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _load()

GROUPS = {
    "rewards": st.lists(st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.25, 0.7]), min_size=2, max_size=7),
    "seed": st.integers(0, 2**32 - 1),
    "spread": st.sampled_from([0.0, 1e-3, 0.5, 10.0]),
}


def embeddings(n: int, seed: int, spread: float) -> torch.Tensor:
    """[n, 6] unit rows around one direction: spread 0 makes them copies."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(1, 6, generator=generator) + spread * torch.randn(n, 6, generator=generator)
    return torch.nn.functional.normalize(rows.double(), dim=-1).float()


@settings(max_examples=30, deadline=None)
@given(**GROUPS, c=st.sampled_from([0.1, 1.0, 10.0, 1000.0]))
def test_shapley_values(rewards: list[float], seed: int, spread: float, c: float) -> None:
    """Coalitions one by one there, a lattice of Schur complements here."""
    embeddings_GD, rewards_G = embeddings(len(rewards), seed, spread), torch.tensor(rewards)
    torch.testing.assert_close(
        torch.as_tensor(shapley_values(embeddings_GD, rewards_G, c=c)),
        example.shapley_values(embeddings_GD, rewards_G, c),
        rtol=1e-9,
        atol=1e-9,
    )
    everyone = torch.ones(1, len(rewards), dtype=torch.bool)
    value = example.team_value(embeddings_GD.double(), rewards_G.double(), c)
    assert float(team_value(embeddings_GD, rewards_G, everyone, c=c)[0]) == pytest.approx(value, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(**GROUPS, c=st.sampled_from([1.0, 10.0]), floor=st.sampled_from([None, 0.3]))
def test_gcpo_advantages(rewards: list[float], seed: int, spread: float, c: float, floor: float | None) -> None:
    embeddings_GD, rewards_G = embeddings(len(rewards), seed, spread), torch.tensor(rewards)
    expected_G = example.gcpo_advantages(embeddings_GD, rewards_G, c, floor)
    got_G = torch.as_tensor(gcpo_advantages(embeddings_GD, rewards_G, c=c, floor=floor))
    torch.testing.assert_close(got_G, expected_G, rtol=1e-8, atol=1e-8)
    method, options = resolve({"name": "gcpo", "c": c, "floor": floor})
    paid = method.credit(
        CreditInputs(
            rewards_G=rewards_G.double(), embeddings_GD=embeddings_GD, lengths_G=torch.ones(len(rewards)).long()
        ),
        options,
    )
    torch.testing.assert_close(paid.advantages_G, expected_G, rtol=1e-8, atol=1e-8)


@given(rewards=GROUPS["rewards"])
def test_grpo_advantages(rewards: list[float]) -> None:
    method, options = resolve({"name": "grpo"})
    rewards_G = torch.tensor(rewards, dtype=torch.float64)
    inputs = CreditInputs(rewards_G=rewards_G, embeddings_GD=None, lengths_G=torch.ones(len(rewards)).long())
    torch.testing.assert_close(
        method.credit(inputs, options).advantages_G, example.grpo_advantages(rewards_G), rtol=1e-12, atol=1e-12
    )


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=5),
    clip=st.sampled_from([(0.2, 0.2), (0.1, 0.4)]),
)
def test_clipped_loss_and_its_gradient(seed: int, lengths: list[tuple[int, int]], clip: tuple[float, float]) -> None:
    """A padded rectangle with one mean over its tokens there, a ragged batch with one weight per token here."""
    generator = torch.Generator().manual_seed(seed)
    width = max(p + c for p, c in lengths)
    new_RS, old_RS = (-torch.rand(len(lengths), width, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages_R = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    mask_RS = torch.zeros(len(lengths), width, dtype=torch.float64)
    for row, (p, c) in enumerate(lengths):
        mask_RS[row, p : p + c] = 1
    new_RS.requires_grad_()
    expected = example.clipped_loss(new_RS, old_RS, advantages_R, mask_RS, *clip)
    (gradient_RS,) = torch.autograd.grad(expected, new_RS)

    real_RS = torch.tensor([[s < p + c for s in range(width)] for p, c in lengths])
    new_T = new_RS.detach()[real_RS].requires_grad_()
    mask_T = mask_RS[real_RS]
    batch = TokenBatch(
        tokens_T=torch.zeros(len(mask_T), dtype=torch.int64),
        cu_seqlens_N1=torch.tensor([0, *np.cumsum([p + c for p, c in lengths])]),
        mask_T=mask_T,
        advantages_T=(advantages_R[:, None] * mask_RS)[real_RS],
        group_N=torch.zeros(len(lengths), dtype=torch.int64),
        old_logprobs_T=old_RS[real_RS],
    )
    method, options = resolve({"name": "gcpo", "loss": {"clip_low": clip[0], "clip_high": clip[1]}})
    loss_T, _ = method.token_loss(TokenStats(logprobs_T=new_T, entropy_T=new_T.detach()), batch, options)
    weights_T = token_weights(batch, count(batch), options.loss.reduce, max_tokens=1)
    loss = (weights_T * loss_T).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)  # weights are float32
    torch.testing.assert_close(torch.autograd.grad(loss, new_T)[0], gradient_RS[real_RS], rtol=1e-6, atol=1e-9)


def test_the_task_is_the_packaged_one_text_for_text() -> None:
    task = make_task("addition", {})
    problems = [(a, b) for a in range(11, 90) for b in range(11, 90) if a % 10 and b % 10]
    assert tuple(problems) == task.problems()
    assert task.strategies == example.METHODS
    for a, b in problems:
        assert example.prompt(a, b) == task.prompt_text((a, b))
        assert [(d.strategy, d.text) for d in task.demonstrations((a, b))] == [
            (method, example.solve(a, b, method)) for method in example.METHODS
        ]


def test_both_verifiers_say_the_same_of_solutions_and_of_what_sampling_makes_of_them() -> None:
    """Right and wrong answers, cut, doubled and shuffled texts."""
    task, rng = make_task("addition", {}), random.Random(0)
    verdicts = []
    for a, b in rng.sample(task.problems(), 200):
        words = rng.choice(task.demonstrations((a, b))).text.split()
        damaged = [
            words,
            words[:-1],
            [*words, "answer"],
            [*words, "."],
            [*words[:-1], str(rng.randrange(10))],
            words[: rng.randrange(len(words))],
            rng.sample(words, len(words)),
            [],
        ]
        for text in map(" ".join, damaged):
            verdicts.append(example.verify(a, b, text))
            assert verdicts[-1] == float(task.verify(task.answer((a, b)), text)), text
    assert 0.1 < np.mean(verdicts) < 0.5


def test_what_is_embedded_leaves_the_answer_out_alike() -> None:
    """The example's one pattern and the package's several, on every way of solving."""
    import re

    for a, b in ((27, 45), (11, 11), (89, 88)):
        for method in example.METHODS:
            text = example.solve(a, b, method)
            assert re.sub(r" ?\. answer [\d ]+$", "", text) == embedded_span(text, "reasoning").removesuffix(" .")


def test_words_come_back() -> None:
    words = example.Words([(27, 45), (68, 19)])
    text = example.solve(27, 45, "write")
    assert words.decode([*words.encode(text), example.EOS, example.PAD]) == text


def test_the_default_floor_is_the_package_s() -> None:
    """One of two equal correct answers: phi = log(1 + 2c) / 2 each, the wrong one 0; the floor shows in the scale."""
    embeddings_GD, rewards_G = torch.tensor([[1.0, 0.0]] * 3), torch.tensor([1.0, 1.0, 0.0])
    phi = math.log1p(20) / 2
    spread = phi * math.sqrt(2) / 3
    expected = (phi - 2 * phi / 3) / (spread + 0.05 * math.log1p(10))
    assert float(example.gcpo_advantages(embeddings_GD, rewards_G)[0]) == pytest.approx(expected)
    assert float(gcpo_advantages(embeddings_GD, rewards_G)[0]) == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(**GROUPS, cooperation=st.sampled_from([0.0, 1.0, 2.5]))
def test_split_advantages(rewards: list[float], seed: int, spread: float, cooperation: float) -> None:
    embeddings_GD, rewards_G = embeddings(len(rewards), seed, spread), torch.tensor(rewards)
    expected_G = example.split_advantages(embeddings_GD, rewards_G, 10.0, cooperation)
    got_G = gcpo_advantages(embeddings_GD, rewards_G, normalize="split", cooperation=cooperation)
    torch.testing.assert_close(torch.as_tensor(got_G), expected_G, rtol=1e-9, atol=1e-9)

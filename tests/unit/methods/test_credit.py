"""The advantages and reward shaping of every method against their closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gcpo.credit import gcpo_advantages, shapley_values
from megatron_gcpo.methods import METHODS, has_signal, resolve
from megatron_gcpo.types import CreditInputs, Steps, Turns

rewards = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=9)


def inputs(rewards_G, embeddings_GD=None, lengths_G=None) -> CreditInputs:
    return CreditInputs(
        rewards_G=torch.tensor(rewards_G, dtype=torch.float64),
        logprobs_G=-torch.arange(len(rewards_G), dtype=torch.float64),
        embeddings_GD=embeddings_GD,
        lengths_G=torch.tensor(lengths_G or [5] * len(rewards_G)),
        texts_G=("",) * len(rewards_G),
        steps=Steps(
            rewards_GK=torch.tensor(rewards_G, dtype=torch.float64)[:, None],
            step_of_token_G=tuple(torch.zeros(5, dtype=torch.int64) for _ in rewards_G),
        ),
        turns=Turns(
            rewards_GK=torch.tensor([rewards_G] * 2, dtype=torch.float64).T,
            lengths_GK=torch.full((len(rewards_G), 2), 5),
            texts_GK=(("", ""),) * len(rewards_G),
        ),
    )


def advantages(name: str, rewards_G, embeddings_GD=None, **options) -> np.ndarray:
    method, chosen = resolve({"name": name, **options})
    credit = method.credit(inputs(rewards_G, embeddings_GD), chosen)
    assert credit.advantages_G.dtype == credit.credits_G.dtype == torch.float64
    return credit.advantages_G.numpy()


def unit_rows(size: int, dim: int = 5, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(size, dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=1)


@settings(max_examples=25, deadline=None)
@given(rewards)
def test_grpo_and_dapo_standardize(rewards_G):
    expected_G = (np.array(rewards_G) - np.mean(rewards_G)) / (np.std(rewards_G) + 1e-4)
    np.testing.assert_allclose(advantages("grpo", rewards_G), expected_G, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(advantages("dapo", rewards_G), expected_G, rtol=1e-9, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(rewards)
def test_dr_grpo_centres(rewards_G):
    np.testing.assert_allclose(advantages("dr_grpo", rewards_G), np.array(rewards_G) - np.mean(rewards_G), atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(rewards)
def test_rloo_subtracts_the_mean_of_the_others(rewards_G):
    expected_G = [r - np.mean(rewards_G[:i] + rewards_G[i + 1 :]) for i, r in enumerate(rewards_G)]
    np.testing.assert_allclose(advantages("rloo", rewards_G), expected_G, atol=1e-12)


def test_rloo_baseline_is_unbiased():
    """Two actions with rewards 1 and 0 and log-odds x: d E[r] / dx = p (1 - p). The mean of A grad log pi over all
    groups of three, each answer's share a third, is the same."""
    p = 0.3
    mean = 0.0
    for mask in range(8):
        actions = [mask >> i & 1 for i in range(3)]
        probability = math.prod(p if a else 1 - p for a in actions)
        advantages_G = advantages("rloo", [float(a) for a in actions])
        mean += probability * np.mean([a_hat * (a - p) for a_hat, a in zip(advantages_G, actions, strict=True)])
    assert mean == pytest.approx(p * (1 - p))


def test_gcpo_is_the_credit_package_under_its_options():
    embeddings_GD = unit_rows(6)
    rewards_G = [1.0, 1.0, 0.0, 0.5, 1.0, 0.0]
    options = {"c": 3.0, "reward_map": "identity", "normalize": "std", "floor": 0.2, "credit_mix": 0.3, "value": "det"}
    method, chosen = resolve({"name": "gcpo", **options})
    credit = method.credit(inputs(rewards_G, embeddings_GD), chosen)
    game = {key: options[key] for key in ("c", "reward_map", "value")}
    np.testing.assert_array_equal(credit.credits_G, shapley_values(embeddings_GD, rewards_G, **game))
    np.testing.assert_array_equal(credit.advantages_G, gcpo_advantages(embeddings_GD, rewards_G, **options))


def test_gcpo_closed_form():
    """Two copies and one new direction are right, one is wrong: log(1 + 2c) / 2 twice, log(1 + c), 0."""
    embeddings_GD = torch.eye(3)[[0, 0, 1, 2]]
    phi_G = np.array([math.log(21) / 2, math.log(21) / 2, math.log(11), 0.0])
    expected_G = (phi_G - phi_G.mean()) / (phi_G.std() + 0.05 * math.log(11))
    np.testing.assert_allclose(advantages("gcpo", [1.0, 1.0, 1.0, 0.0], embeddings_GD), expected_G, rtol=1e-12)


def test_gcpo_metrics():
    """Right: e1, e1 and e2 - cosines 1, 0, 0, mean 1/3. Sampled beyond exact_limit, then with an error."""
    embeddings_GD = torch.eye(3)[[0, 0, 1, 2]]
    rewards_G = [1.0, 1.0, 1.0, 0.0]
    method, exact = resolve({"name": "gcpo"})
    metrics = method.credit(inputs(rewards_G, embeddings_GD), exact).metrics
    assert metrics == {
        "team_value": pytest.approx(math.log(21) + math.log(11)),
        "shapley_stderr": 0.0,
        "sampled_share": 0.0,
        "correct_cosine": pytest.approx(1 / 3),
    }
    _, sampled = resolve({"name": "gcpo", "exact_limit": 2, "num_permutations": 16})
    metrics = method.credit(inputs(rewards_G, embeddings_GD), sampled).metrics
    assert metrics["sampled_share"] == 1.0
    assert metrics["shapley_stderr"] > 0
    assert "correct_cosine" not in method.credit(inputs([0.0, 1.0]), exact).metrics


def test_gcpo_agrees_with_grpo_on_one_right_rollout():
    rewards_G = [0.0, 0.0, 1.0, 0.0]
    np.testing.assert_allclose(
        advantages("gcpo", rewards_G, floor=0.0), advantages("grpo", rewards_G), rtol=5e-4
    )  # GRPO's own 1e-4


@pytest.mark.parametrize("name", METHODS)
def test_credit_changes_no_input(name):
    given_inputs = inputs([1.0, 0.0, 1.0, 0.0], unit_rows(4))
    method, options = resolve({"name": name})
    method.credit(given_inputs, options)
    assert given_inputs.rewards_G.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_signal_is_asked_of_advantages():
    """All right: GRPO's group says nothing, GCPO's does unless the answers are the same."""
    ones = [1.0] * 4
    assert not has_signal(torch.tensor(advantages("grpo", ones)))
    assert not has_signal(torch.tensor(advantages("rloo", [0.1] * 3)))
    assert has_signal(torch.tensor(advantages("gcpo", ones, torch.eye(2)[[0, 0, 0, 1]])))
    assert not has_signal(torch.tensor(advantages("gcpo", ones, torch.eye(2)[[0, 0, 0, 0]])))
    assert not has_signal(torch.tensor(advantages("gcpo", [0.0] * 4)))


class TestOverlong:
    OVERLONG = {"max_tokens": 20, "buffer": 8}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("length", "penalty"), [(1, 0.0), (12, 0.0), (14, -0.125), (16, -0.25), (20, -0.5), (25, -0.5)]
    )
    @pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "rloo"])
    def test_linear_over_the_buffer(self, name, length, penalty):
        method, options = resolve({"name": name, "overlong": self.OVERLONG})
        shaped_G = method.shape_rewards(torch.tensor([1.0, 0.0]).double(), torch.tensor([length, length]), options)
        assert shaped_G.tolist() == pytest.approx([1 + penalty, penalty])

    def test_is_the_papers_penalty_after_normalization(self):
        """Rewards of -1 and 1 minus a penalty of up to 1 are 2 x - 1 of ours: the same standardized advantages."""
        method, options = resolve({"name": "dapo", "overlong": self.OVERLONG})
        right_G, lengths_G = torch.tensor([1.0, 0.0, 1.0, 0.0]).double(), torch.tensor([13, 17, 20, 3])
        paper_G = 2 * right_G - 1 - ((lengths_G - 12) / 8).clamp(0, 1)
        ours_G = method.shape_rewards(right_G, lengths_G, options)
        torch.testing.assert_close(2 * ours_G - 1, paper_G)

    def test_gcpo_rewards_stay_within_0_and_1(self):
        method, options = resolve({"name": "gcpo", "overlong": self.OVERLONG})
        shaped_G = method.shape_rewards(torch.tensor([1.0, 0.0, 0.25]).double(), torch.tensor([16, 20, 20]), options)
        assert shaped_G.tolist() == [0.75, 0.0, 0.0]
        method.credit(
            CreditInputs(rewards_G=shaped_G, embeddings_GD=None, lengths_G=torch.tensor([16, 20, 20])), options
        )

    @pytest.mark.parametrize("name", METHODS)
    def test_off_by_default(self, name):
        method, options = resolve({"name": name})
        rewards_G = torch.tensor([1.0, 0.0]).double()
        torch.testing.assert_close(method.shape_rewards(rewards_G, torch.tensor([10**6, 1]), options), rewards_G)

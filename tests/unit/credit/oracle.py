"""The game by its definition, and random teams to play it with."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import strategies as st


def weigh(rewards_G: np.ndarray, reward_map: str) -> np.ndarray:
    return {"sqrt": np.sqrt(rewards_G), "identity": rewards_G, "binary": (rewards_G > 0).astype(float)}[reward_map]


def value_of(embeddings_GD, rewards_G, members, value="logdet", c=10.0, reward_map="sqrt") -> float:
    """v(S) from X itself: det(I + X X^T) by LU, one coalition at a time."""
    x = math.sqrt(c) * weigh(rewards_G, reward_map)[:, None] * embeddings_GD
    x = x[list(members)]
    sign, log_det = np.linalg.slogdet(np.eye(len(x)) + x @ x.T)
    assert sign == 1
    return log_det if value == "logdet" else math.exp(log_det) - 1


def brute_force_shapley(embeddings_GD, rewards_G, **game) -> np.ndarray:
    """phi_i = sum over S without i of |S|! (G - |S| - 1)! / G! (v(S + i) - v(S)), null players included."""
    size = len(rewards_G)
    values = {
        s: value_of(embeddings_GD, rewards_G, s, **game)
        for n in range(size + 1)
        for s in itertools.combinations(range(size), n)
    }
    phi_G = np.zeros(size)
    for i in range(size):
        for s, v in values.items():
            if i not in s:
                share = math.factorial(len(s)) * math.factorial(size - len(s) - 1) / math.factorial(size)
                phi_G[i] += share * (values[tuple(sorted((*s, i)))] - v)
    return phi_G


def random_team(rng: np.random.Generator, size: int, dim: int = 6, spread: float = 1.0):
    """Unit rows around a common direction (spread 0: all the same) and rewards of which about a third are 0."""
    embeddings_GD = spread * rng.normal(size=(size, dim)) + rng.normal(size=dim)
    embeddings_GD /= np.linalg.norm(embeddings_GD, axis=1, keepdims=True)
    rewards_G = rng.uniform(0.05, 1.0, size) * (rng.uniform(size=size) > 0.33)
    return embeddings_GD, rewards_G


@st.composite
def teams(draw, min_size: int = 2, max_size: int = 6):
    """(embeddings_GD, rewards_G): binary or graded rewards, embeddings from nearly equal to spread out."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(min_size, max_size))
    embeddings_GD, rewards_G = random_team(
        rng, size, draw(st.sampled_from([1, 3, 16])), draw(st.sampled_from([0.1, 1, 5]))
    )
    return embeddings_GD, np.ceil(rewards_G) if draw(st.booleans()) else rewards_G


@st.composite
def games(draw):
    """The options that define a game."""
    return {
        "value": draw(st.sampled_from(["logdet", "det"])),
        "c": draw(st.sampled_from([0.1, 1.0, 10.0, 100.0])),
        "reward_map": draw(st.sampled_from(["sqrt", "identity", "binary"])),
    }

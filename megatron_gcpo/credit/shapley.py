"""The Shapley value of every rollout: its marginal contribution to the team, averaged over all orders of joining."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_gcpo.credit.coalition import CHUNK_BYTES, log_volume_lattice, volumes_from_logs
from megatron_gcpo.credit.options import CreditOptions, credit_options
from megatron_gcpo.credit.team import Array, Team, build_team, same_kind


@dataclass(frozen=True, kw_only=True)
class TeamCredit:
    """How the value of a whole team divides among its rollouts."""

    credits_G: np.ndarray
    """[G] float64 Shapley values; exactly 0 for rollouts with reward 0. They sum to ``team_value``."""
    stderr_G: np.ndarray
    """[G] float64 standard errors of the credits; 0 unless sampled."""
    team_value: float
    """v(all rollouts)."""
    sampled: bool
    """True when permutations were sampled instead of enumerating every coalition."""


def shapley_values(embeddings_GD: Array | None, rewards_G: Array, **options: Any) -> Array:
    """[G] float64: the Shapley value of every rollout in the game of ``team_value``.

    Inputs as in ``team.build_team``; a tensor comes back if one came in. Options: ``CreditOptions``. Exact up to
    ``exact_limit`` rewarded rollouts (always for ``value="det"``), beyond it an unbiased estimate whose error
    ``team_credit`` reports. Errors: ValueError on bad input or where det leaves float64.
    """
    return same_kind(team_credit(embeddings_GD, rewards_G, **options).credits_G, embeddings_GD, rewards_G)


def team_credit(embeddings_GD: Array | None, rewards_G: Array, **options: Any) -> TeamCredit:
    """The Shapley values together with the team's value and the sampling error; arguments of ``shapley_values``."""
    chosen = credit_options(options)
    return divide(build_team(embeddings_GD, rewards_G, chosen), chosen)


def divide(team: Team, options: CreditOptions) -> TeamCredit:
    """Pays a team that is already built (``team_credit`` builds it)."""
    k = len(team.members_K)
    sampled = options.value == "logdet" and k > options.exact_limit
    stderr_K = np.zeros(k)
    if options.value == "det":
        credits_K = exact_det(team.kernel_KK)
    elif sampled:
        credits_K, stderr_K = sampled_logdet(team.kernel_KK, options.num_permutations, options.seed)
    else:
        credits_K = exact_logdet(team.kernel_KK)
    credits_G, stderr_G = np.zeros(len(team.rewards_G)), np.zeros(len(team.rewards_G))
    credits_G[team.members_K] = credits_K
    stderr_G[team.members_K] = stderr_K
    return TeamCredit(credits_G=credits_G, stderr_G=stderr_G, team_value=float(credits_K.sum()), sampled=sampled)


def exact_logdet(kernel_KK: np.ndarray) -> np.ndarray:
    """[K] exact Shapley values of v(S) = log det(I + L_S), from all 2^K values.

    Adding the two weights that v(S) has in phi_i (joining in, staying out) and using sum phi = v(all) gives (derived;
    for general games the least-squares form of Ruiz, Valenciano and Zarzuelo 1998)

        phi_i = v(all) / K + a_i - mean(a),   a_i = sum over S containing i, |S| = s < K, of v(S) / ((K-1) C(K-2, s-1)).

    The a_i come from one weighted copy of the lattice: the upper half of the index is where the last member belongs,
    and folding the halves onto each other leaves the same problem for the others. About 4 x 2^K operations in all.
    """
    k = len(kernel_KK)
    if k == 0:
        return np.zeros(0)
    lattice = log_volume_lattice(kernel_KK)
    weight_of_size = np.zeros(k + 1)
    weight_of_size[1:k] = [1 / ((k - 1) * math.comb(k - 2, s - 1)) for s in range(1, k)]
    sums = weight_of_size.take(np.bitwise_count(np.arange(1 << k, dtype=np.uint32)))
    sums *= lattice
    shares_K = np.empty(k)
    for i in reversed(range(k)):
        half = 1 << i
        shares_K[i] = sums[half : 2 * half].sum()
        sums[:half] += sums[half : 2 * half]
    return lattice[-1] / k + (shares_K - shares_K.mean())


def exact_det(kernel_KK: np.ndarray) -> np.ndarray:
    """[K] exact Shapley values of v(S) = det(I + L_S) - 1, in K^3 operations.

    The multilinear extension of det(I + L_S) is det(I + diag(t) L), so phi_i is the integral over t in [0, 1] of
    det(I + tL) [L (I + tL)^-1]_ii (Owen 1972), a polynomial of degree K - 1 that ceil(K / 2) Gauss-Legendre nodes
    integrate exactly. With L = Q diag(lambda) Q^T both factors are rational in lambda. Errors: ValueError on overflow.
    """
    k = len(kernel_KK)
    if k == 0:
        return np.zeros(0)
    nodes, node_weights = np.polynomial.legendre.leggauss((k + 1) // 2)
    times_Q, time_weights_Q = (nodes + 1) / 2, node_weights / 2
    eigenvalues_K, vectors_KK = np.linalg.eigh(kernel_KK)
    eigenvalues_K = np.clip(eigenvalues_K, 0, None)
    grown_QK = 1 + times_Q[:, None] * eigenvalues_K
    determinants_Q = 1 + volumes_from_logs(np.log(grown_QK).sum(1))
    return (time_weights_Q * determinants_Q) @ (eigenvalues_K / grown_QK) @ (vectors_KK**2).T


def sampled_logdet(kernel_KK: np.ndarray, num_permutations: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """([K] unbiased Shapley values, [K] standard errors) of v(S) = log det(I + L_S) from random orders of joining.

    The Cholesky factor of I + L with rows and columns in the order of joining grows by one row for each member, and the
    square of its corner is what that member multiplies the volume by: one factor gives all K marginal contributions.
    Every order is used forwards and backwards (antithetic), and the error is that of independent pairs. The credits of
    each order sum to v(all), hence so do their means.
    """
    k = len(kernel_KK)
    padded_KK = np.eye(k) + kernel_KK
    orders_NK = np.random.default_rng(seed).permuted(np.tile(np.arange(k), (num_permutations // 2, 1)), axis=1)
    marginals_NK = np.empty((num_permutations // 2, k))
    chunk = max(1, CHUNK_BYTES // (16 * k * k))
    for start in range(0, len(orders_NK), chunk):
        forward = orders_NK[start : start + chunk]
        marginals_NK[start : start + chunk] = (
            _joining_gains(padded_KK, forward) + _joining_gains(padded_KK, forward[:, ::-1])
        ) / 2
    return marginals_NK.mean(0), marginals_NK.std(0, ddof=1) / math.sqrt(len(marginals_NK))


def _joining_gains(padded_KK: np.ndarray, orders_NK: np.ndarray) -> np.ndarray:
    """[N, K] gain in log volume of each member (by its own index) when all join in the given orders."""
    factors_NKK = np.linalg.cholesky(padded_KK[orders_NK[:, :, None], orders_NK[:, None, :]])
    gains_NK = np.empty(orders_NK.shape)
    np.put_along_axis(gains_NK, orders_NK, 2 * np.log(np.diagonal(factors_NKK, axis1=1, axis2=2)), axis=1)
    return gains_NK

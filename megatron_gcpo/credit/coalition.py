"""What a coalition of rollouts is worth: the volume spanned by its reward-weighted embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_gcpo.credit.options import credit_options
from megatron_gcpo.credit.team import Array, as_float64, build_team, same_kind

CHUNK_BYTES = 32 << 20
"""Most bytes of batched matrices held at once."""


def team_value(embeddings_GD: Array | None, rewards_G: Array, masks_CG: Array, **options: Any) -> Array:
    """[C] float64: the value v(S) of each coalition, masks_CG[c, i] = 1 where rollout i belongs to coalition c.

    ``value="logdet"``: v(S) = log det(I + L_S); ``"det"``: det(I + L_S) - 1, with L_ij = c w(r_i) w(r_j) e_i.e_j
    (our reconstruction of arXiv 2605.11461). Nats for logdet. Inputs as in ``team.build_team``; a tensor comes back if
    one came in. Options: ``CreditOptions``. Errors: ValueError on bad input or where det leaves float64.
    """
    chosen = credit_options(options)
    team = build_team(embeddings_GD, rewards_G, chosen)
    wanted_CG = as_float64(masks_CG, "masks_CG")
    if wanted_CG.ndim != 2 or wanted_CG.shape[1] != len(team.rewards_G):
        raise ValueError(
            f"masks_CG has shape {wanted_CG.shape}: expected [C, {len(team.rewards_G)}], a row per coalition"
        )
    if not ((wanted_CG == 0) | (wanted_CG == 1)).all():
        raise ValueError("masks_CG holds other values than 0 and 1: a rollout is in a coalition or not")
    values_C = log_volumes(team.kernel_KK, wanted_CG[:, team.members_K])
    if chosen.value == "det":
        values_C = volumes_from_logs(values_C)
    return same_kind(values_C, embeddings_GD, rewards_G, masks_CG)


def log_volumes(kernel_KK: np.ndarray, masks_CK: np.ndarray) -> np.ndarray:
    """[C] log det(I + L_S) of the coalitions given as 0/1 float64 masks, by batched Cholesky factors."""
    num_coalitions, k = masks_CK.shape
    values_C = np.zeros(num_coalitions)
    chunk = max(1, CHUNK_BYTES // (8 * max(1, k * k)))
    for start in range(0, num_coalitions, chunk):
        masks = masks_CK[start : start + chunk]
        factors = np.linalg.cholesky(np.eye(k) + masks[:, :, None] * masks[:, None, :] * kernel_KK)
        values_C[start : start + chunk] = 2 * np.log(np.diagonal(factors, axis1=1, axis2=2)).sum(1)
    return values_C


def log_volume_lattice(kernel_KK: np.ndarray) -> np.ndarray:
    """[2^K] log det(I + L_S) of every coalition; bit i of the index says whether member i belongs to it.

    Recursive Schur complements (derived): with members 0..j-1 decided, every one of their 2^j subsets S keeps the Schur
    complement of its block of I + L in the rows and columns j..K-1. Its corner is det(I + L_{S+j}) / det(I + L_S), at
    least 1; leaving j out drops row and column j, taking it in also subtracts the rank-1 update. The work is about
    6 x 2^K multiply-adds where one determinant each would be 2^K K^3 / 3. The subset is the *last* axis, so that every
    operation runs over long contiguous vectors. Memory: below 32 bytes x 2^K at any moment.
    """
    k = len(kernel_KK)
    values = np.empty(1 << k)
    values[0] = 1
    schur = (np.eye(k) + kernel_KK)[:, :, None]
    for j in range(k):
        half = 1 << j
        row = schur[0]
        values[half : 2 * half] = row[0]
        rest = schur[1:, 1:]
        schur = np.empty((k - j - 1, k - j - 1, 2 * half))
        schur[..., :half] = rest
        taken = schur[..., half:]
        np.multiply(row[1:, None], row[1:] / row[0], out=taken)
        np.subtract(rest, taken, out=taken)
    np.log(values, out=values)
    for j in range(k):
        half = 1 << j
        values[half : 2 * half] += values[:half]
    return values


def volumes_from_logs(log_volumes_C: np.ndarray) -> np.ndarray:
    """det(I + L_S) - 1 from its logarithm; refuses what float64 cannot hold."""
    with np.errstate(over="ignore"):
        volumes_C = np.expm1(log_volumes_C)
    if not np.isfinite(volumes_C).all():
        raise ValueError(
            f"value=det overflows float64 (log det = {log_volumes_C.max():.0f}): use value=logdet or a smaller c"
        )
    return volumes_C

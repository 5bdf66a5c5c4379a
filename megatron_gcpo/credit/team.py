"""From embeddings and rewards to the kernel of the cooperative game, with every complaint about bad input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_gcpo.credit.options import CreditOptions

type Array = np.ndarray | torch.Tensor

UNIT_TOLERANCE = 1e-3
"""How far from 1 the norm of an embedding may be: wide enough for bfloat16 encoders, far from any raw hidden state."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """The rollouts of one group as players."""

    rewards_G: np.ndarray
    """[G] float64 in [0, 1]."""
    members_K: np.ndarray
    """[K] int64 indices of the rollouts with non-zero reward; all others are null players."""
    kernel_KK: np.ndarray
    """[K, K] float64, L_ij = c w(r_i) w(r_j) e_i.e_j."""
    cosines_KK: np.ndarray
    """[K, K] float64, e_i.e_j."""


def build_team(embeddings_GD: Array | None, rewards_G: Array, options: CreditOptions) -> Team:
    """The kernel of one group's non-null rollouts.

    embeddings_GD: [G, D] unit rows, any float dtype; a rollout with reward 0 may have a zero row. When at most one
    rollout is rewarded nothing is compared, so that row may be zero too (it counts as a unit row) or the whole None.
    rewards_G: [G] in [0, 1]. Arithmetic is float64 on the CPU.
    Errors: ValueError for wrong shapes, NaN or infinity, rewards outside [0, 1], rewarded rows that are not unit.
    """
    rewards_G = as_float64(rewards_G, "rewards_G")
    _check_rewards(rewards_G)
    members_K = np.flatnonzero(rewards_G)
    if embeddings_GD is None:
        if len(members_K) > 1:
            raise ValueError(
                f"embeddings_GD is None but {len(members_K)} rollouts are rewarded: "
                "from two rewarded rollouts on, the credit compares their embeddings; pass one unit row for each"
            )
        cosines_KK = np.ones((len(members_K), len(members_K)))
    else:
        embeddings_GD = as_float64(embeddings_GD, "embeddings_GD")
        cosines_KK = _cosines(embeddings_GD, rewards_G, members_K)
    weights_K = _weigh(rewards_G[members_K], options.reward_map)
    kernel_KK = options.c * np.outer(weights_K, weights_K) * cosines_KK
    return Team(rewards_G=rewards_G, members_K=members_K, kernel_KK=kernel_KK, cosines_KK=cosines_KK)


def as_float64(values: Any, name: str) -> np.ndarray:
    """A numpy float64 copy-or-view of an array, tensor (any device) or nested sequence."""
    if isinstance(values, torch.Tensor):
        return values.detach().to("cpu", torch.float64).numpy()
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is not a rectangular array of numbers: {error}") from None


def same_kind(result: np.ndarray, *inputs: Array | None) -> Array:
    """The result as a CPU tensor if any input was a tensor, else as it is."""
    return torch.from_numpy(result) if any(isinstance(x, torch.Tensor) for x in inputs) else result


def _check_rewards(rewards_G: np.ndarray) -> None:
    if rewards_G.ndim != 1 or len(rewards_G) == 0:
        raise ValueError(f"rewards_G has shape {rewards_G.shape}: expected [G], one reward for each rollout of a group")
    if not np.isfinite(rewards_G).all():
        bad = int(np.flatnonzero(~np.isfinite(rewards_G))[0])
        raise ValueError(
            f"rewards_G[{bad}] is {rewards_G[bad]}: the verifier must give a finite reward (0 for no verdict)"
        )
    if rewards_G.min() < 0 or rewards_G.max() > 1:
        bad = int(np.flatnonzero((rewards_G < 0) | (rewards_G > 1))[0])
        raise ValueError(
            f"rewards_G[{bad}] = {rewards_G[bad]:g} is outside [0, 1]: the reward scales a rollout's volume; "
            "rescale the verifier's rewards, or use a method that takes any reward (grpo, rloo)"
        )


def _cosines(embeddings_GD: np.ndarray, rewards_G: np.ndarray, members_K: np.ndarray) -> np.ndarray:
    """e_i.e_j of the rewarded rollouts, after checking the rows."""
    if embeddings_GD.ndim != 2 or len(embeddings_GD) != len(rewards_G):
        raise ValueError(
            f"embeddings_GD has shape {embeddings_GD.shape} for {len(rewards_G)} rewards: expected "
            f"[{len(rewards_G)}, D], one row for each rollout (zero rows for rollouts with reward 0)"
        )
    if not np.isfinite(embeddings_GD).all():
        bad = int(np.flatnonzero(~np.isfinite(embeddings_GD).all(1))[0])
        raise ValueError(f"embeddings_GD[{bad}] holds NaN or infinity: the encoder's output is broken")
    rows_KD = embeddings_GD[members_K]
    cosines_KK = rows_KD @ rows_KD.T
    norms_K = np.sqrt(cosines_KK.diagonal())
    if len(members_K) == 1 and norms_K[0] == 0:
        return np.ones((1, 1))
    if np.abs(norms_K - 1).max(initial=0) > UNIT_TOLERANCE:
        bad = int(np.flatnonzero(np.abs(norms_K - 1) > UNIT_TOLERANCE)[0])
        what = "is all zeros (not embedded?)" if norms_K[bad] == 0 else f"has norm {norms_K[bad]:g}"
        raise ValueError(
            f"embeddings_GD[{members_K[bad]}] {what} but its rollout has reward {rewards_G[members_K[bad]]:g}: "
            "every rewarded rollout needs a row of norm 1; embed it and normalize"
        )
    return cosines_KK


def _weigh(rewards_K: np.ndarray, reward_map: str) -> np.ndarray:
    match reward_map:
        case "sqrt":
            return np.sqrt(rewards_K)
        case "identity":
            return rewards_K
        case _:
            return np.ones_like(rewards_K)

"""Embeddings of a step's groups, under the cost rule: only where a credit can depend on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_gcpo.embed.encoder import Encoder
from megatron_gcpo.embed.span import Span, embedded_span
from megatron_gcpo.types import Group


def embed_groups(
    encoder: Encoder,
    groups: Sequence[Group],
    rewards: Sequence[np.ndarray | torch.Tensor],
    *,
    span: Span,
) -> list[torch.Tensor | None]:
    """Per group [G, D] float32 unit rows, zero rows where a rollout has no reward; None where fewer than two have one.

    Wrong rollouts are null players and one correct rollout alone has a value that does not depend on its direction, so
    neither is embedded. All texts of all groups go to the encoder in one call, which encodes each distinct one once.

    Args:
        rewards: [G] per group, the rewards that the credit will see.

    Raises:
        ValueError: a reward is not finite, or the encoder fails on a text.
    """
    wanted: list[tuple[int, int]] = []
    for p, (group, rewards_G) in enumerate(zip(groups, rewards, strict=True)):
        values = np.asarray(rewards_G, dtype=np.float64)
        assert values.shape == (len(group.rollouts),), f"got rewards {values.shape}, expected ({len(group.rollouts)},)"
        if not np.isfinite(values).all():
            raise ValueError(
                f"prompt {group.prompt.id!r} has rewards {values.tolist()}: the verifier must give numbers"
            )
        rewarded = np.flatnonzero(values)
        if len(rewarded) >= 2:
            wanted += [(p, int(g)) for g in rewarded]
    rows_ND = encoder.encode([embedded_span(groups[p].rollouts[g].text, span) for p, g in wanted])
    embeddings: list[torch.Tensor | None] = [None] * len(groups)
    for (p, g), row_D in zip(wanted, rows_ND, strict=True):
        embeddings_GD = embeddings[p]
        if embeddings_GD is None:
            embeddings_GD = embeddings[p] = torch.zeros(len(groups[p].rollouts), rows_ND.shape[1])
        embeddings_GD[g] = row_D
    return embeddings


def cosine_metrics(embeddings: Sequence[torch.Tensor | None]) -> dict[str, float]:
    """How alike the embedded rollouts of a group are: over groups, the mean of their mean and of their largest cosine.

    Between different rollouts of a group only; groups without embeddings do not count. Empty when none has any.
    """
    means, largest = [], []
    for embeddings_GD in embeddings:
        if embeddings_GD is None:
            continue
        rows_KD = embeddings_GD[embeddings_GD.any(dim=-1)].double()
        upper = torch.triu_indices(len(rows_KD), len(rows_KD), offset=1)
        cosines = (rows_KD @ rows_KD.T)[upper[0], upper[1]]
        means.append(float(cosines.mean()))
        largest.append(float(cosines.max()))
    if not means:
        return {}
    return {"embed/cosine_mean": float(np.mean(means)), "embed/cosine_max": float(np.mean(largest))}

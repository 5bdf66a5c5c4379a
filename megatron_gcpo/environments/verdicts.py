"""Every turn of a conversation is judged by itself, in one call for all groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from megatron_gcpo.types import Group, Rollout, Turns, Verdicts


class Pool(Protocol):
    """What scores groups; verify.pool.VerifierPool is one."""

    def score(self, groups: Sequence[Group]) -> list[Verdicts]: ...


def score(pool: Pool, groups: Sequence[Group]) -> list[Verdicts]:
    """Verdicts of every rollout: of its last turn, with the rewards of all turns where it has several."""
    turns = [rollout.turns for group in groups for rollout in group.rollouts]
    counts = {1 if said is None else len(said) for said in turns}
    if counts <= {1}:
        return pool.score(groups)
    assert len(counts) == 1, f"got conversations of {sorted(counts)} turns, expected one number"
    num_turns = counts.pop()
    judged = pool.score([_at(group, k) for k in range(num_turns) for group in groups])
    by_turn = [judged[k * len(groups) : (k + 1) * len(groups)] for k in range(num_turns)]
    return [
        replace(own[-1], turn_rewards_GK=np.stack([verdict.rewards_G for verdict in own], axis=1))
        for own in zip(*by_turn, strict=True)
    ]


def turns_of(group: Group, verdict: Verdicts) -> Turns | None:
    """What a credit may know of a group's turns; None for single answers."""
    if verdict.turn_rewards_GK is None:
        return None
    return Turns(
        rewards_GK=torch.from_numpy(verdict.turn_rewards_GK).double(),
        lengths_GK=torch.tensor([_lengths(rollout) for rollout in group.rollouts]),
        texts_GK=tuple(rollout.turns or () for rollout in group.rollouts),
    )


def _at(group: Group, turn: int) -> Group:
    said = [(rollout, (rollout.turns or ())[turn]) for rollout in group.rollouts]
    return replace(group, rollouts=tuple(replace(rollout, text=text) for rollout, text in said))


def _lengths(rollout: Rollout) -> list[int]:
    """Tokens of each turn: the runs of trained tokens."""
    assert rollout.trained_T is not None, "got a conversation without trained tokens, expected which ones are"
    edges = np.flatnonzero(np.diff(np.concatenate([[False], rollout.trained_T, [False]]).astype(np.int8)))
    return (edges[1::2] - edges[::2]).tolist()

"""From rollouts to tokens: the ragged batch in which every trained token carries its rollout's advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_gcpo.types import Credit, Group, Rollout, TokenBatch


def rollout_batch(groups: Sequence[Group], credits: Sequence[Credit]) -> TokenBatch:
    """Every rollout of these groups as one row, prompt and completion, paid by its advantage. No groups: no rows."""
    rows = [
        (group.prompt.token_ids, rollout.token_ids, rollout.logprobs, _trained(rollout), advantage)
        for group, credit in zip(groups, credits, strict=True)
        for rollout, advantage in zip(group.rollouts, _advantages(credit), strict=True)
    ]
    sizes = [len(group.rollouts) for group in groups]
    batch = _batch(rows, torch.arange(len(groups)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64)))
    parts = [credit.parts_GK for credit in credits if credit.parts_GK is not None]
    assert len(parts) in (0, len(credits)), f"got parts of {len(parts)} groups, expected {len(credits)} or none"
    return replace(batch, routed_experts_T=_routed_experts(groups), parts_NK=torch.cat(parts) if parts else None)


def demonstration_batch(pairs: Sequence[tuple[Sequence[int], Sequence[int] | np.ndarray]]) -> TokenBatch:
    """(prompt ids, completion ids) pairs as rows of their own group, every completion token with advantage 1."""
    rows = [
        (prompt, np.asarray(completion), np.zeros(len(completion)), np.ones(len(completion)), 1.0)
        for prompt, completion in pairs
    ]
    return _batch(rows, torch.arange(len(pairs)))


def probe_batch(groups: Sequence[Group], num_rows: int = 4) -> TokenBatch:
    """A few rollouts, to compare what trainer and engine say of the same tokens: the first of the first groups."""
    return demonstration_batch([(g.prompt.token_ids, g.rollouts[0].token_ids) for g in groups[:num_rows]])


def completions(groups: Sequence[Group], values_T: torch.Tensor) -> list[list[np.ndarray]]:
    """Per group and rollout the [T] values of its completion, from those of all tokens of ``rollout_batch``."""
    values, start = values_T.numpy(), 0
    cut: list[list[np.ndarray]] = []
    for group in groups:
        cut.append([])
        for rollout in group.rollouts:
            first = start + len(group.prompt.token_ids)
            start = first + len(rollout.token_ids)
            cut[-1].append(values[first:start])
    return cut


def _trained(rollout: Rollout) -> np.ndarray:
    """[T], 1 where the policy drew the token."""
    return np.ones(len(rollout.token_ids)) if rollout.trained_T is None else rollout.trained_T.astype(np.float64)


def _advantages(credit: Credit) -> Sequence[float | np.ndarray]:
    """Of each rollout: one number, or one for each token."""
    if credit.token_advantages_G is None:
        return credit.advantages_G.tolist()
    return [own_T.numpy() for own_T in credit.token_advantages_G]


type _Row = tuple[Sequence[int], np.ndarray, np.ndarray, np.ndarray, float | np.ndarray]
"""prompt ids, completion ids, log-probs, whether trained, advantage"""


def _batch(rows: Sequence[_Row], group_N: torch.Tensor) -> TokenBatch:
    lengths = [len(prompt) + len(completion) for prompt, completion, *_ in rows]
    boundaries = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    tokens_T = np.zeros(boundaries[-1], dtype=np.int64)
    mask_T, advantages_T, logprobs_T = (np.zeros(boundaries[-1], dtype=np.float32) for _ in range(3))
    for (prompt, completion, logprobs, trained, advantage), start, end in zip(
        rows, boundaries[:-1], boundaries[1:], strict=True
    ):
        first = start + len(prompt)
        tokens_T[start:first], tokens_T[first:end] = prompt, completion
        mask_T[first:end], advantages_T[first:end], logprobs_T[first:end] = trained, trained * advantage, logprobs
    return TokenBatch(
        tokens_T=torch.from_numpy(tokens_T),
        cu_seqlens_N1=torch.from_numpy(boundaries),
        mask_T=torch.from_numpy(mask_T),
        advantages_T=torch.from_numpy(advantages_T),
        group_N=group_N,
        rollout_logprobs_T=torch.from_numpy(logprobs_T),
    )


def _routed_experts(groups: Sequence[Group]) -> torch.Tensor | None:
    """[T, layers, k] int16, rollout after rollout, -1 for those that no engine drew; None unless an engine recorded any."""
    rollouts = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    shapes = {r.routed_experts.shape[1:] for _, r in rollouts if r.routed_experts is not None}
    if not shapes:
        return None
    assert len(shapes) == 1, f"got routing of shapes {sorted(shapes)}, expected one (layers, k)"
    unknown_1Lk = np.full((1, *shapes.pop()), -1, np.int16)
    routed = [
        unknown_1Lk.repeat(len(prompt.token_ids) + len(r.token_ids), 0)
        if r.routed_experts is None
        else r.routed_experts
        for prompt, r in rollouts
    ]
    return torch.from_numpy(np.concatenate(routed))

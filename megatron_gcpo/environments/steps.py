"""Answers in verifiable steps: where each step ends in text and in tokens, and what the verifier says of each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_gcpo.environments.verdicts import Pool
from megatron_gcpo.types import Group, Prompt, Steps, Verdicts


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One step of an answer."""

    end: int
    """Characters of the completion up to the end of the step; not falling from step to step."""
    text: str
    """What the verifier gets to see of it, with the step's number in Prompt.extras["step"]; "": nothing was claimed."""


type Split = Callable[[Prompt, str], tuple[Claim, ...]]
"""(prompt, completion) -> its steps before the final one, the same number for all completions of a prompt. Pure."""


def judge_steps(
    pool: Pool, groups: Sequence[Group], verdicts: Sequence[Verdicts], split: Split, decode: Callable[[list[int]], str]
) -> list[Steps]:
    """Every step of every rollout, judged in one call. The final step is the rest of the answer, with its own verdict."""
    claims = [[split(group.prompt, rollout.text) for rollout in group.rollouts] for group in groups]
    views = [_view(group, own, k) for group, own in zip(groups, claims, strict=True) for k in range(len(own[0]))]
    judged = iter(pool.score(views) if views else [])
    found = []
    for group, verdict, own in zip(groups, verdicts, claims, strict=True):
        columns = [next(judged).rewards_G for _ in own[0]]
        found.append(
            Steps(
                rewards_GK=torch.from_numpy(np.stack([*columns, verdict.rewards_G], axis=1)).double(),
                step_of_token_G=tuple(
                    steps_of_tokens([c.end for c in said], rollout.token_ids.tolist(), decode)
                    for said, rollout in zip(own, group.rollouts, strict=True)
                ),
            )
        )
    return found


def steps_of_tokens(
    step_ends: Sequence[int], token_ids: Sequence[int], decode: Callable[[list[int]], str]
) -> torch.Tensor:
    """[T] int64 step of each token: the first one that does not end before the token does; the final one behind them."""
    ends_T = torch.tensor(token_ends(token_ids, decode), dtype=torch.int64)
    return torch.searchsorted(torch.tensor(step_ends, dtype=torch.int64), ends_T)


def token_ends(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[int]:
    """Characters of the decoded text up to the end of each token; a part of a character ends where it began.

    A token is decoded with the ones of the last complete character before it, as its text may depend on them.
    """
    ends, total, first, settled = [], 0, 0, 0
    for i in range(len(token_ids)):
        before = decode(list(token_ids[first:settled]))
        text = decode(list(token_ids[first : i + 1]))
        if len(text) > len(before) and not text.endswith("\ufffd"):
            total += len(text) - len(before)
            first, settled = settled, i + 1
        ends.append(total)
    return ends


def _view(group: Group, claims: Sequence[Sequence[Claim]], step: int) -> Group:
    prompt = replace(group.prompt, extras={**group.prompt.extras, "step": step})
    said = zip(group.rollouts, claims, strict=True)
    return Group(prompt=prompt, rollouts=tuple(replace(rollout, text=own[step].text) for rollout, own in said))

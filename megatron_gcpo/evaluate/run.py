"""What judged samples are worth: one record for each prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from megatron_gcpo.config.records import SourceConfig
from megatron_gcpo.data import make_task
from megatron_gcpo.embed.encoder import Encoder
from megatron_gcpo.embed.groups import embed_groups
from megatron_gcpo.embed.span import Span
from megatron_gcpo.evaluate.diversity import effective_rank, vendi_score
from megatron_gcpo.evaluate.report import PromptEval
from megatron_gcpo.types import Group, Rollout, Verdicts
from megatron_gcpo.verify.verifiers.extract import final_answer, normalise

CORRECT = 0.99
"""The least reward that counts as solved; some verifiers give wrong answers a few hundredths for their form."""

type Labeller = Callable[[str], str | None]
"""Completion text -> the strategy it follows, or None when it is not recognised. Measures, never trains."""


def task_labeller(source: SourceConfig) -> Labeller | None:
    """Packaged tasks know the strategies of their solutions; None for other sources."""
    if source.kind != "task":
        return None
    strategy = make_task(source.name, source.options).strategy
    return lambda text: None if (name := strategy(text)) == "none" else name


def measure(
    groups: Sequence[Group],
    verdicts: Sequence[Verdicts],
    *,
    encoder: Encoder | None = None,
    span: Span = "reasoning",
    labeller: Labeller | None = None,
) -> list[PromptEval]:
    """One record per group. Only correct samples are embedded, and only where at least two are."""
    correct = [np.asarray(verdict.rewards_G) >= CORRECT for verdict in verdicts]
    embeddings: list[torch.Tensor | None] = [None] * len(groups)
    if encoder is not None:
        embeddings = embed_groups(encoder, groups, [c.astype(np.float64) for c in correct], span=span)
    records = []
    for group, verdict, correct_n, embeddings_GD in zip(groups, verdicts, correct, embeddings, strict=True):
        vendi, rank = _spread(correct_n, embeddings_GD) if encoder is not None else (None, None)
        texts = [rollout.text for rollout in group.rollouts]
        records.append(
            PromptEval(
                prompt_id=group.prompt.id,
                correct_n=tuple(bool(c) for c in correct_n),
                labels_n=tuple(map(labeller, texts)) if labeller is not None else None,
                vendi=vendi,
                effective_rank=rank,
                mean_tokens=float(np.mean([_drawn(rollout) for rollout in group.rollouts])),
                truncated=sum(rollout.finish_reason == "length" for rollout in group.rollouts),
                answers_n=tuple(map(_answer, texts)),
                turns_nK=_turns(verdict),
            )
        )
    return records


def _answer(text: str) -> str | None:
    found = final_answer(text)
    return None if found is None else hashlib.blake2b(normalise(found).encode("utf-8", "replace")).hexdigest()


def _drawn(rollout: Rollout) -> int:
    """Tokens of the policy; a user's turns are not its own."""
    return len(rollout.token_ids) if rollout.trained_T is None else int(rollout.trained_T.sum())


def _turns(verdict: Verdicts) -> tuple[tuple[bool, ...], ...] | None:
    if verdict.turn_rewards_GK is None:
        return None
    return tuple(tuple(bool(right) for right in row_K) for row_K in verdict.turn_rewards_GK >= CORRECT)


def _spread(correct_n: np.ndarray, embeddings_GD: torch.Tensor | None) -> tuple[float | None, float | None]:
    """Vendi score and effective rank of the correct samples: nothing of none, 1 of one, which needs no embedding."""
    if embeddings_GD is None:
        return (1.0, 1.0) if correct_n.any() else (None, None)
    rows_KD = embeddings_GD[torch.from_numpy(correct_n)]
    return vendi_score(rows_KD), effective_rank(rows_KD)

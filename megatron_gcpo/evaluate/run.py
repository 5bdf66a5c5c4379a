"""Sample held-out prompts, judge the samples, and measure them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from megatron_gcpo.embed.encoder import Encoder
from megatron_gcpo.embed.groups import embed_groups
from megatron_gcpo.embed.span import Span
from megatron_gcpo.evaluate.diversity import effective_rank, vendi_score
from megatron_gcpo.evaluate.passk import miss_probability
from megatron_gcpo.evaluate.report import EvalReport, PromptEval, summarize_evals
from megatron_gcpo.rollout.engine import RolloutEngine, Sampling
from megatron_gcpo.rollout.groups import generate_groups
from megatron_gcpo.types import Group, Prompt, Verdicts

CORRECT = 0.99
"""The least reward that counts as solved; some verifiers give wrong answers a few hundredths for their form."""

type Labeller = Callable[[Prompt, str], str | None]
"""(prompt, completion text) -> the strategy it follows, or None when it is not recognised. Measures, never trains."""


class Scorer(Protocol):
    """What judges groups; the verifier pool is one."""

    def score(self, groups: Sequence[Group]) -> list[Verdicts]: ...


def evaluate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    pool: Scorer,
    decode: Callable[[list[int]], str],
    samples: int,
    max_new_tokens: int,
    sampling: Sampling,
    ks: Sequence[int],
    run_seed: int,
    step: int = 0,
    encoder: Encoder | None = None,
    span: Span = "reasoning",
    labeller: Labeller | None = None,
) -> EvalReport:
    """Sample, verify, embed and summarise; see ``summarize_evals`` for the metrics.

    Seeds derive from (run seed, "evaluate", step, prompt id, sample): with a fixed ``step`` two policies are compared
    on the same random numbers. A replica that evaluates only its share calls ``measure``, and whoever has all
    the records ``summarize_evals``.

    Raises:
        ValueError: no prompts, a k above ``samples`` or a prompt too long (all before sampling).
    """
    if not prompts:
        raise ValueError("there are no prompts to evaluate; check data.heldout")
    for k in ks:
        miss_probability(samples, 0, k)
    groups = generate_groups(
        engine,
        prompts,
        group_size=samples,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        decode=decode,
        run_seed=run_seed,
        step=step,
        stream="evaluate",
    )
    return summarize_evals(measure(groups, pool.score(groups), encoder=encoder, span=span, labeller=labeller), ks)


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
    for group, correct_n, embeddings_GD in zip(groups, correct, embeddings, strict=True):
        vendi, rank = _spread(correct_n, embeddings_GD) if encoder is not None else (None, None)
        texts = [rollout.text for rollout in group.rollouts]
        records.append(
            PromptEval(
                prompt_id=group.prompt.id,
                correct_n=tuple(bool(c) for c in correct_n),
                labels_n=tuple(labeller(group.prompt, text) for text in texts) if labeller is not None else None,
                vendi=vendi,
                effective_rank=rank,
                mean_tokens=float(np.mean([len(rollout.token_ids) for rollout in group.rollouts])),
                truncated=sum(rollout.finish_reason == "length" for rollout in group.rollouts),
            )
        )
    return records


def _spread(correct_n: np.ndarray, embeddings_GD: torch.Tensor | None) -> tuple[float | None, float | None]:
    """Vendi score and effective rank of the correct samples: nothing of none, 1 of one, which needs no embedding."""
    if embeddings_GD is None:
        return (1.0, 1.0) if correct_n.any() else (None, None)
    rows_KD = embeddings_GD[torch.from_numpy(correct_n)]
    return vendi_score(rows_KD), effective_rank(rows_KD)

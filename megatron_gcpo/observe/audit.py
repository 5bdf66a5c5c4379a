"""Signs that a run learned its reward instead of its task, from what it saved: numbers and findings, no model.

The dangers are those that surveys of rewards for reasoning name (arXiv 2602.09305): a reward that grows while held-out
accuracy does not, a reward that follows length, a format that is paid without an answer, an answer that is paid whatever
the question, held-out problems among the training ones. The measures and limits are ours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_gcpo.evaluate.contamination import find_overlaps
from megatron_gcpo.observe.history import History
from megatron_gcpo.observe.replay import SavedGroup

FORMATS = ("", "\\boxed{}", "<answer></answer>", "<think></think><answer></answer>", "The answer is", "answer .")
"""Completions that keep a form and answer nothing."""

type Judge = Callable[[Sequence[tuple[str, Sequence[str]]]], list[np.ndarray]]
"""(problem id, completions) pairs -> the rewards of each problem's completions."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What the audit needs of a training or held-out problem."""

    id: str
    text: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Limits:
    """From where on a measure is a finding."""

    gap_growth: float = 0.1
    """Rise of the training reward beyond that of the held-out pass@1."""
    length_correlation: float = 0.5
    """|correlation| of reward and length within groups."""
    constant_reward: float = 0.4
    """Mean reward of one completion over many problems."""
    min_problems: int = 8
    """Fewer say nothing about constants."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One measure."""

    name: str
    value: float | None
    """None: what the run saved does not tell."""
    flagged: bool
    detail: str


def gap(history: History, limits: Limits) -> Finding:
    """How much more the training reward rose than held-out pass@1, from the first to the last evaluation."""
    _, heldout = history.series("eval/pass@1")
    if history.summary is not None and history.summary.before is not None and "pass@1" in history.summary.before:
        heldout = [history.summary.before["pass@1"], *heldout]
    reward_steps, rewards = history.series("reward/mean")
    if len(heldout) < 2 or len(rewards) < 2:
        return Finding(name="train/held-out gap", value=None, flagged=False, detail="fewer than two evaluations")
    window = max(1, len(rewards) // 10)
    rise = float(np.mean(rewards[-window:]) - np.mean(rewards[:window]))
    growth = rise - (heldout[-1] - heldout[0])
    detail = (
        f"reward {rise:+.3f} over steps {reward_steps[0]} to {reward_steps[-1]}, held-out pass@1 "
        f"{heldout[-1] - heldout[0]:+.3f}"
    )
    return Finding(name="train/held-out gap", value=growth, flagged=growth > limits.gap_growth, detail=detail)


def length_correlation(groups: Sequence[SavedGroup], limits: Limits) -> Finding:
    """Pearson correlation of reward and length, both less their group's mean: across problems it would say nothing."""
    rewards = np.concatenate([g.rewards_G - g.rewards_G.mean() for g in groups])
    lengths = np.concatenate([g.lengths_G - g.lengths_G.mean() for g in groups])
    scale = float(np.sqrt((rewards**2).sum() * (lengths**2).sum()))
    if scale == 0:
        return Finding(name="reward follows length", value=None, flagged=False, detail="no group has both to compare")
    value = float((rewards * lengths).sum() / scale)
    detail = "longer answers are paid" if value > 0 else "shorter answers are paid"
    return Finding(
        name="reward follows length", value=value, flagged=abs(value) > limits.length_correlation, detail=detail
    )


def format_only(problems: Sequence[Problem], judge: Judge) -> Finding:
    """Largest share of problems on which a completion without an answer is paid."""
    rewards = judge([(problem.id, FORMATS) for problem in problems])
    paid_F = (np.stack(rewards) > 0).mean(0)
    worst = int(paid_F.argmax())
    detail = f"{FORMATS[worst]!r} is paid" if paid_F[worst] else f"{len(FORMATS)} forms without an answer, none paid"
    return Finding(
        name="format without answer", value=float(paid_F[worst]), flagged=bool(paid_F[worst] > 0), detail=detail
    )


def constant_output(
    groups: Sequence[SavedGroup], problems: Sequence[Problem], judge: Judge, limits: Limits, count: int = 3
) -> Finding:
    """Largest mean reward that one completion earns over all problems: the texts paid on most problems, and the most
    frequent answers."""
    name = "one answer for everything"
    if len(problems) < limits.min_problems:
        return Finding(name=name, value=None, flagged=False, detail=f"fewer than {limits.min_problems} problems")
    paid_on: dict[str, set[str]] = defaultdict(set)
    for group in groups:
        for text, reward in zip(group.texts, group.rewards_G, strict=True):
            if reward > 0:
                paid_on[text].add(group.prompt_id)
    favourites = sorted(paid_on, key=lambda text: (-len(paid_on[text]), text))[:count]
    answers = [answer for answer, _ in Counter(p.answer for p in problems if p.answer).most_common(count)]
    candidates = list(dict.fromkeys([*favourites, *(f"\\boxed{{{answer}}}" for answer in answers)]))
    if not candidates:
        return Finding(name=name, value=None, flagged=False, detail="nothing was ever paid")
    means_C = np.stack(judge([(problem.id, candidates) for problem in problems])).mean(0)
    best = int(means_C.argmax())
    return Finding(
        name=name,
        value=float(means_C[best]),
        flagged=bool(means_C[best] > limits.constant_reward),
        detail=f"{_short(candidates[best])} on {len(problems)} problems",
    )


def overlap(training: Sequence[Problem], heldout: Sequence[Problem]) -> Finding:
    """Share of held-out problems that share an n-gram of 13 words (shorter ones: all of theirs) with a training problem."""
    name = "held-out problems in training"
    if not heldout:
        return Finding(name=name, value=None, flagged=False, detail="the run has no held-out problems")
    found = find_overlaps([(p.id, p.text) for p in heldout], [p.text for p in training])
    detail = f"{found[0].prompt_id}: {_short(found[0].example)}" if found else f"none of {len(heldout)}"
    return Finding(name=name, value=len(found) / len(heldout), flagged=bool(found), detail=detail)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else line[:57] + "...")

"""What an evaluation found: one small record per prompt, which replicas can exchange, and their summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich import box
from rich.table import Table

from megatron_gcpo.evaluate.diversity import distinct_at_k, effective_number
from megatron_gcpo.evaluate.majority import majority_at_k
from megatron_gcpo.evaluate.passk import pass_at_k
from megatron_gcpo.evaluate.turns import transition_shares


@dataclass(frozen=True, kw_only=True)
class PromptEval:
    """What the n samples of one prompt were worth. Holds no text and no embedding."""

    prompt_id: str
    correct_n: tuple[bool, ...]
    labels_n: tuple[str | None, ...] | None
    """The strategy each sample followed, None for one that was not recognised; None: strategies were not asked for."""
    vendi: float | None
    """Vendi score of the correct samples' embeddings; None: none correct, or no encoder."""
    effective_rank: float | None
    """Effective rank of the same."""
    mean_tokens: float
    """Mean number of tokens that the policy drew for a sample."""
    truncated: int
    """Samples that reached the token limit."""
    answers_n: tuple[str | None, ...]
    """A hash of each sample's final answer, None where none was found: answers are only compared."""
    turns_nK: tuple[tuple[bool, ...], ...] | None = None
    """Whether each turn of each conversation was right, the last one as in ``correct_n``; None: single answers."""

    @property
    def num_samples(self) -> int:
        return len(self.correct_n)

    @property
    def num_correct(self) -> int:
        return sum(self.correct_n)


def per_prompt(prompts: Sequence[PromptEval], ks: Sequence[int]) -> dict[str, list[float]]:
    """The metrics that are means over prompts, a value for each prompt that has one; an interval may be put around them.

    ``avg`` accuracy of the samples (avg@n); ``pass@k`` (arXiv 2107.03374); ``maj@k``, for k above 1, whether the plurality of
    k samples is right; ``mean_tokens``; ``truncated`` share of samples. All of these are about the last turn of a
    conversation; ``first_turn`` and the transitions (evaluate.turns) say what the turns before it were. With labels:
    ``distinct@k``, the expected number of different strategies among the correct ones of k samples. With embeddings, of the
    prompts that have a correct sample: ``vendi`` and ``effective_rank`` of the correct samples.

    Raises:
        ValueError: no prompts, or a k above the number of samples of a prompt.
    """
    if not prompts:
        raise ValueError("there are no prompts to evaluate; check data.heldout")
    values: dict[str, list[float]] = {"avg": [p.num_correct / p.num_samples for p in prompts]}
    for k in ks:
        values[f"pass@{k}"] = [pass_at_k(p.num_samples, p.num_correct, k) for p in prompts]
    for k in ks:
        if k > 1:
            values[f"maj@{k}"] = [majority_at_k(p.answers_n, p.correct_n, k) for p in prompts]
    if all(p.labels_n is not None for p in prompts):
        for k in ks:
            values[f"distinct@{k}"] = [distinct_at_k(_correct_labels(p), k) for p in prompts]
    for name in ("vendi", "effective_rank"):
        known = [value for p in prompts if (value := getattr(p, name)) is not None]
        if known:
            values[name] = known
    turns = [transition_shares(p.turns_nK) for p in prompts if p.turns_nK is not None]
    values |= {name: [shares[name] for shares in turns] for name in (turns[0] if turns else ())}
    values["mean_tokens"] = [p.mean_tokens for p in prompts]
    values["truncated"] = [p.truncated / p.num_samples for p in prompts]
    return values


def summarize_evals(prompts: Sequence[PromptEval], ks: Sequence[int]) -> dict[str, float]:
    """``per_prompt`` averaged, ``prompts`` their number, and what only all samples pooled can say.

    With labels: ``effective_strategies``, exp(entropy) of the strategies of all samples (the unrecognised ones are a
    strategy of their own), and ``effective_strategies_correct``, the same of the correct ones. The order of the prompts does
    not matter.

    Raises:
        ValueError: as ``per_prompt``.
    """
    metrics = {"prompts": float(len(prompts))}
    metrics |= {name: fmean(values) for name, values in per_prompt(prompts, ks).items()}
    if all(p.labels_n is not None for p in prompts):
        pairs = [pair for p in prompts for pair in zip(p.labels_n or (), p.correct_n, strict=True)]
        metrics["effective_strategies"] = effective_number(label for label, _ in pairs)
        metrics["effective_strategies_correct"] = effective_number(label for label, correct in pairs if correct)
    return metrics


def _correct_labels(prompt: PromptEval) -> list[str | None]:
    pairs = zip(prompt.labels_n or (), prompt.correct_n, strict=True)
    return [label if correct else None for label, correct in pairs]


MEANINGS = {
    "pass": "accuracy of a sample, or of the best of k",
    "maj": "accuracy of the majority's answer",
    "distinct": "strategies among the correct of k",
    "effective_strategies": "strategies of all samples, by entropy",
    "vendi": "coverage: different correct answers, by embedding",
    "mean_tokens": "length of an answer",
    "truncated": "share of answers cut off",
    "first_turn": "accuracy of the first answer",
    "repaired": "wrong, then right",
    "held": "right, then right",
    "broken": "right, then wrong",
    "lost": "wrong, then wrong",
}
"""The metrics that a person is shown, in this order; ``avg`` is pass@1, and the others are for plots."""


def evaluation_table(title: str, columns: Mapping[str, Mapping[str, float]]) -> Table:
    """Evaluations of one policy over time, oldest first: a row per metric, and how the last two differ.

    columns: heading -> metrics of ``summarize_evals``; "-" where one lacks a metric.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    evaluations = list(columns.values())
    changed = len(evaluations) > 1
    table.add_column("")
    for heading in (*columns, *(["change"] if changed else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", style="dim", no_wrap=True, overflow="ellipsis")
    names = dict.fromkeys(name for metrics in evaluations for name in metrics)
    for kind, meaning in MEANINGS.items():
        for name in (name for name in names if name.partition("@")[0] == kind and name != "distinct@1"):
            cells = [f"{metrics[name]:.3f}" if name in metrics else "-" for metrics in evaluations]
            if changed:
                known = all(name in metrics for metrics in evaluations[-2:])
                cells.append(f"{evaluations[-1][name] - evaluations[-2][name]:+.3f}" if known else "-")
            table.add_row(name, *cells, meaning)
    return table

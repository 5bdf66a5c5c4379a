"""What an evaluation found: one small record per prompt, which replicas can exchange, and their summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.table import Table

from megatron_gcpo.evaluate.diversity import distinct_at_k, effective_number
from megatron_gcpo.evaluate.passk import mean_pass_at_k


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
    """Mean completion length."""
    truncated: int
    """Samples that reached the token limit."""

    @property
    def num_samples(self) -> int:
        return len(self.correct_n)

    @property
    def num_correct(self) -> int:
        return sum(self.correct_n)


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """An evaluation: its metrics, and the prompts they summarise."""

    metrics: Mapping[str, float]
    prompts: tuple[PromptEval, ...]

    def table(self, title: str = "evaluation") -> Table:
        """The metrics as a two-column table for a terminal."""
        return report_table({title: self})


def summarize_evals(prompts: Sequence[PromptEval], ks: Sequence[int]) -> EvalReport:
    """Metrics over all prompts; the order of the prompts does not matter.

    ``avg`` mean accuracy (avg@n); ``pass@k``; ``mean_tokens``; ``truncated`` share of samples. With labels:
    ``distinct@k``, the mean over prompts of the expected number of different strategies among the correct ones of k
    samples; ``effective_strategies``, exp(entropy) of the strategies of all samples pooled (the unrecognised ones are a
    strategy of their own); ``effective_strategies_correct``, the same of the correct ones. With embeddings, over the
    prompts that have a correct sample: ``vendi`` and ``effective_rank`` of the correct samples.

    Raises:
        ValueError: no prompts, or a k above the number of samples of a prompt.
    """
    counts = [(p.num_samples, p.num_correct) for p in prompts]
    metrics = {"prompts": float(len(prompts)), "avg": mean_pass_at_k(counts, 1)}
    for k in ks:
        metrics[f"pass@{k}"] = mean_pass_at_k(counts, k)
    metrics["mean_tokens"] = fmean(p.mean_tokens for p in prompts)
    metrics["truncated"] = sum(p.truncated for p in prompts) / sum(p.num_samples for p in prompts)
    if all(p.labels_n is not None for p in prompts):
        metrics |= _strategy_metrics(prompts, ks)
    for name, values in (
        ("vendi", [p.vendi for p in prompts]),
        ("effective_rank", [p.effective_rank for p in prompts]),
    ):
        known = [value for value in values if value is not None]
        if known:
            metrics[name] = fmean(known)
    return EvalReport(metrics=metrics, prompts=tuple(prompts))


def _strategy_metrics(prompts: Sequence[PromptEval], ks: Sequence[int]) -> dict[str, float]:
    labels = [list(zip(p.labels_n or (), p.correct_n, strict=True)) for p in prompts]
    correct_only = [[label if correct else None for label, correct in pairs] for pairs in labels]
    metrics = {f"distinct@{k}": fmean(distinct_at_k(row, k) for row in correct_only) for k in ks}
    metrics["effective_strategies"] = effective_number(label for pairs in labels for label, _ in pairs)
    metrics["effective_strategies_correct"] = effective_number(
        label for pairs in labels for label, correct in pairs if correct
    )
    return metrics


def report_table(reports: Mapping[str, EvalReport]) -> Table:
    """Several evaluations side by side: a row per metric, a column per report; "-" where one lacks a metric."""
    table = Table("metric", *reports)
    names = dict.fromkeys(name for report in reports.values() for name in report.metrics)
    for name in names:
        cells = [f"{report.metrics[name]:.4g}" if name in report.metrics else "-" for report in reports.values()]
        table.add_row(name, *cells)
    return table

"""From what a step did on every rank to the numbers that are written: means over replicas, times of rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.collect import Experience
from megatron_gcpo.observe.flops import utilization
from megatron_gcpo.observe.tally import Tally
from megatron_gcpo.observe.timers import Stopwatch
from megatron_gcpo.types import UpdateStats


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step did, as this rank saw it."""

    step: int
    """0-based."""
    clock: Stopwatch
    experience: Experience | None
    """On leaders, in stage rl."""
    prepared: Mapping[str, float] = field(default_factory=dict)
    """Global numbers of phase one (methods.prepare), the same on every rank."""
    corrected: Mapping[str, float] = field(default_factory=dict)
    """The gap between the policies that drew and that learn (loss.correction); percentiles are of this replica."""
    updates: Sequence[UpdateStats]
    """Global numbers, the same on every rank."""
    pushed: dict[str, float] | None
    """Of this replica's leader, in stage rl."""
    num_tokens: int
    """Tokens of this replica's sequences, prompts included."""
    num_rows: int
    """Sequences of this replica."""
    entropy_T: torch.Tensor | None = None
    """[T] of the batch that was trained on, under the policy before the step; None where nobody asked."""


def step_metrics(report: StepReport, topology: Topology, provider: Any) -> dict[str, float]:
    """All metrics of a step on rank 0, an empty dict elsewhere. Leaders exchange numbers, never text."""
    tally = Tally()
    tally.add_all(report.pushed or {}, prefix="push/")
    if report.experience is not None:
        tally = tally.merge([report.experience.tally])
    gathered = topology.gather_objects_from_leaders((tally, report.num_tokens, report.num_rows))
    if gathered is None:
        return {}
    seconds = report.clock.seconds()
    metrics = Tally().merge(tally for tally, _, _ in gathered).means()
    num_tokens, num_rows = (sum(counts) for counts in zip(*(counts for _, *counts in gathered), strict=True))
    metrics |= {f"method/{name}": value for name, value in report.prepared.items()}
    metrics |= {f"correction/{name}": value for name, value in report.corrected.items()}
    metrics |= {f"time/{phase}_s": value for phase, value in seconds.items()}
    metrics["perf/tokens_per_s"] = num_tokens / seconds["total"]
    metrics |= utilization(provider, num_tokens, num_rows, seconds["update"], topology.world_size)
    metrics["perf/memory_peak_gb"] = topology.platform.memory_peak_bytes() / 1e9
    return metrics | _update_metrics(report.updates)


def _update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    tally = Tally()
    # A part of the step whose groups were all filtered out computes no token; its zeros are no measurements.
    for update in [u for u in updates if u.useful_token_share] or updates:
        tally.add_all(
            {
                "loss": update.loss,
                "grad_norm": update.grad_norm,
                "learning_rate": update.learning_rate,
                "useful_token_share": update.useful_token_share,
                **update.metrics,
            },
            prefix="train/",
        )
    means = tally.means()
    if means.get("train/correction_ratio_squared"):
        # effective sample size of the tokens' ratios, as a share of the tokens
        means["train/correction_ess"] = means["train/correction_ratio"] ** 2 / means["train/correction_ratio_squared"]
    return {**means, "train/skipped_updates": float(sum(u.skipped for u in updates))}

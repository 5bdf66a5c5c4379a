"""THE step: from prompts to a better policy. Every rank of a replica runs it; its leader alone sees text."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_gcpo.collect import collect
from megatron_gcpo.credit.tokens import demonstration_batch, probe_batch, rollout_batch
from megatron_gcpo.loss.streams import beside
from megatron_gcpo.methods import without_unsampled
from megatron_gcpo.observe.report import StepReport
from megatron_gcpo.observe.timers import Stopwatch
from megatron_gcpo.policy.scale import weights
from megatron_gcpo.run import Run
from megatron_gcpo.types import TokenBatch, TokenStats, joined


def train_step(run: Run, step: int) -> StepReport:
    """One step of reinforcement learning."""
    clock = Stopwatch(run.watch)
    with clock("generate"):
        run.choose_prompts(step)
    experience = collect(run, run.leader, step, clock) if run.leader else None
    run.rest_engine()
    sent = None
    if experience is not None:
        judged = run.learn_from(step, experience.seen, experience.tally)
        sent = (rollout_batch(*experience.kept()), judged, probe_batch(experience.groups), experience.outcome())

    with run.watch.phase("receive the batch"):  # tensors only, and only inside the replica
        batch, judged, probe, outcome = run.topology.broadcast_object(sent)
    with clock("logprobs"):
        batch, stats = _score(run, batch)
    with clock("prepare"):  # what couples a group or the batch becomes constants; a micro-batch sees only some rows
        batch, prepared = run.prepare(batch, stats, outcome, step)
        batch, corrected = run.correct(batch)
    parts = [_weigh(run, part) for part in _mini_batches(batch, run.config.train.mini_batches)]
    if judged is not None:
        with clock("logprobs"):
            parts = _with_judgements(run, parts, judged)
    with clock("update"):
        wanted = stats is None and run.config.observe.rollouts
        updates = [run.actor.update(part, run.token_loss, entropies=wanted) for part in parts]
    with clock("push"):
        pushed = run.push(probe, version=step + 1)
    return StepReport(
        step=step,
        clock=clock,
        experience=experience,
        prepared=prepared,
        corrected=corrected,
        updates=updates,
        pushed=pushed,
        entropy_T=updates[0].entropy_T if stats is None else stats.entropy_T,
        num_tokens=sum(len(part.tokens_T) for part in parts),
        num_rows=sum(part.num_rows for part in parts),
    )


def sft_step(run: Run, step: int) -> StepReport:
    """One step of supervised learning on demonstrations, in the same trainer."""
    clock = Stopwatch(run.watch)
    sent = demonstration_batch(run.demonstrations(step)) if run.leader else None
    with run.watch.phase("receive the batch"):
        batch = _weigh(run, run.topology.broadcast_object(sent))
    with clock("update"):
        updates = [run.actor.update(batch, run.token_loss)]
    return StepReport(
        step=step,
        clock=clock,
        experience=None,
        updates=updates,
        pushed=None,
        num_tokens=len(batch.tokens_T),
        num_rows=batch.num_rows,
    )


def _score(run: Run, batch: TokenBatch) -> tuple[TokenBatch, TokenStats | None]:
    """The batch with the log-probabilities of the old and the reference policy, and all statistics of the old one.

    Part by part as the updates will see it: the same micro-batches, so that the first update's ratio is exactly 1.
    """
    parts = _mini_batches(batch, run.config.train.mini_batches)
    stats = None
    if run.needs_old_logprobs:
        wanted = {name: name in run.needs for name in ("second_moments", "head_gram")}
        stats = joined([run.actor.logprobs(part, **wanted) for part in parts])
        batch = replace(batch, old_logprobs_T=stats.logprobs_T)
    if run.reference:
        batch = replace(batch, ref_logprobs_T=joined([run.reference.logprobs(part) for part in parts]).logprobs_T)
    return without_unsampled(batch), stats


def _with_judgements(run: Run, parts: list[TokenBatch], judged: TokenBatch) -> list[TokenBatch]:
    """The parts with a share of the policy's judgements of prompts each: a stream with its own loss and its own means."""
    judged, _ = run.correct(_score(run, judged)[0])
    shares = [_weigh(run, part) for part in _mini_batches(judged, len(parts))]
    return [beside(part, share, run.judge_coef) for part, share in zip(parts, shares, strict=True)]


def _weigh(run: Run, batch: TokenBatch) -> TokenBatch:
    return weights(batch, run.reduce, run.config.rollout.max_new_tokens, run.topology.dp_cpu_pg)


def _mini_batches(batch: TokenBatch, count: int) -> list[TokenBatch]:
    """Whole groups, shared evenly over ``count`` updates; a part may be empty when groups were filtered out."""
    groups = batch.group_N.unique()
    return [batch.rows(torch.isin(batch.group_N, part).nonzero()[:, 0]) for part in groups.tensor_split(count)]

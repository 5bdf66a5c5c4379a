"""A run from start to finish on one rank: assemble, resume, evaluate, train, checkpoint, summarize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from rich.console import Console

from megatron_gcpo.cluster import topology
from megatron_gcpo.cluster.deadline import Watch
from megatron_gcpo.cluster.platform import Platform
from megatron_gcpo.collect import embedded_texts
from megatron_gcpo.config.records import Config
from megatron_gcpo.contract.check import check_contract
from megatron_gcpo.environments import score
from megatron_gcpo.evaluate import measure, summarize_evals
from megatron_gcpo.observe.profile import profiled
from megatron_gcpo.observe.progress import ProgressBar
from megatron_gcpo.observe.report import StepReport, step_metrics
from megatron_gcpo.observe.rollouts import drop_rollouts_after, write_rollouts
from megatron_gcpo.observe.sinks import Sink, open_sinks
from megatron_gcpo.observe.summary import Summary, print_evaluations, print_summary
from megatron_gcpo.policy import checkpoint, export
from megatron_gcpo.reshard.check import NO_LIMIT
from megatron_gcpo.resume import check_continuation, find_checkpoint
from megatron_gcpo.run import Run, assemble
from megatron_gcpo.step import sft_step, train_step
from megatron_gcpo.usage import make_console

STEPS = {"rl": train_step, "sft": sft_step}


def work(config: Config, folder: Path, platform: Platform) -> int:
    """What each rank of a run does; its exit code."""
    ranks = topology.init(config.cluster, platform)
    with Watch(ranks.store, ranks.rank, ranks.world_size, config.cluster.collective_timeout_s) as watch:
        with watch.phase("assemble"):
            run = assemble(config, ranks, watch, folder)
        try:
            train(run)
        finally:
            run.close()
    ranks.close()
    return 0


def train(run: Run) -> None:
    """Go on from the newest complete checkpoint up to the configured number of steps."""
    settings, steps, console = run.config, run.config.run.steps, make_console()
    summary = _resume(run)
    _hand_over(run, summary.step)
    sinks = _open(run, summary)
    if summary.before is None and settings.evaluate.at_start:
        summary = replace(summary, before=evaluate(run))
        _show(run, summary, console)
    profile_steps = settings.observe.profile_steps
    if run.leader is not None:
        run.leader.rollouts.begin(summary.step)
    with ProgressBar(
        settings.run.name, steps, summary.step, console, run.is_first and settings.observe.progress
    ) as bar:
        for step in range(summary.step, steps):
            with profiled(run.folder / "profile", step + 1, run.topology.rank, wanted=step + 1 in profile_steps):
                report = STEPS[settings.run.stage](run, step)
            metrics = step_metrics(report, run.topology, run.actor.policy.provider)
            summary = summary.after_step(report.clock.seconds(), sum(u.skipped for u in report.updates))
            _dump(run, report)
            last = summary.step == steps
            if settings.evaluate.every and summary.step % settings.evaluate.every == 0 and not last:
                found = evaluate(run)
                summary = summary.evaluated(found)
                metrics |= {f"eval/{name}": value for name, value in found.items()}
                _show(run, summary, console)
            _write(sinks, summary.step, metrics)
            bar.advance(summary.step, metrics)
            if summary.step % settings.checkpoint.every == 0 or last:
                _save(run, summary)
            exports = settings.checkpoint.export_hf_every
            if exports and (summary.step % exports == 0 or last):
                _export(run, summary.step)
    if settings.evaluate.at_end:
        summary = replace(summary, after=evaluate(run))
        _write(sinks, steps, {f"eval/{name}": value for name, value in (summary.after or {}).items()})
    for sink in sinks:
        sink.close()
    if run.is_first:
        summary.write(run.folder)
        print_summary(summary, settings.run.name, run.folder, console)


def _show(run: Run, summary: Summary, console: Console) -> None:
    if run.is_first and run.config.observe.progress:
        print_evaluations(summary, run.config.run.name, console)


def evaluate(run: Run) -> dict[str, float]:
    """Measures of the policy on the held-out prompts; on rank 0, an empty dict elsewhere. Collective.

    Each replica samples its share and sends numbers, never text. Every evaluation of a run draws the same random
    numbers, so that two policies are compared on the same ones.
    """
    settings, leader = run.config, run.leader
    if settings.data.heldout is None:
        return {}
    with run.watch.phase("evaluate"):
        if settings.run.stage == "sft":  # supervised steps do not keep the engine up to date
            run.push(run.starting_probe())
        if leader is None:
            return {}
        assert leader.heldout is not None, "got no held-out prompts, expected those of data.heldout"
        sampling = replace(leader.sampling, temperature=settings.evaluate.temperature, top_k=0, top_p=1.0, min_p=0.0)
        with leader.rollouts.exclusive():
            groups = leader.draw(
                leader.heldout.prompts[run.topology.replica :: run.topology.num_replicas],
                step=0,
                group_size=settings.evaluate.samples,
                sampling=sampling,
                stream="evaluate",
            )
        records = measure(
            groups,
            score(leader.pool, groups),
            encoder=leader.encoder,
            span=settings.embed.span,
            labeller=leader.strategy_of,
        )
        if leader.encoder is not None:
            leader.encoder.take_metrics()  # what an evaluation embeds is no number of the next step
        gathered = run.topology.gather_objects_from_leaders(records)
    if gathered is None:
        return {}
    return summarize_evals([record for records in gathered for record in records], settings.evaluate.ks)


def _hand_over(run: Run, version: int) -> None:
    """The engine gets its first weights, and must be found to say what the trainer says."""
    rl = run.config.run.stage == "rl"
    with run.watch.phase("push"):
        # the contract compares more than a push does, and says what is wrong
        run.push(run.starting_probe(), version=version, limit=NO_LIMIT if rl else None)
    if rl:
        with run.watch.phase("compare trainer and engine"):
            check_contract(run)


def _resume(run: Run) -> Summary:
    """Where the run stands: the newest complete checkpoint's summary, or a new one; the actor holds its state."""
    data = run.topology.broadcast_object_to_all(run.leader.prompts.fingerprint() if run.leader else None)
    newest = run.topology.broadcast_object_to_all(find_checkpoint(run.config, run.folder) if run.is_first else None)
    if newest is None:
        return Summary(data=data)
    with run.watch.phase("resume"):
        summary = Summary(**checkpoint.load(newest, run.actor))
    run.restore(summary.method_state)
    check_continuation(run.config, run.folder, summary, data)
    return summary


def _save(run: Run, summary: Summary) -> None:
    with run.watch.phase("checkpoint"):
        keep = run.config.checkpoint.keep_last
        state = replace(summary, method_state=run.method_state()).to_json()
        checkpoint.save(run.folder, run.actor, state, step=summary.step, keep_last=keep)
    if run.leader is not None and run.leader.encoder is not None:
        # A run that resumes here remembers no embedding, and one that goes on must do the same arithmetic: the last
        # bits of an embedding depend on the texts it is computed with.
        run.leader.encoder.forget()


def _export(run: Run, step: int) -> None:
    settings, tokenizer = run.config, run.leader.tokenizer if run.leader else None
    with run.watch.phase("export"):
        merged = settings.checkpoint.export_merged
        export.export(run.folder, run.actor, settings.model, tokenizer, step=step, merged=merged)


def _open(run: Run, summary: Summary) -> list[Sink]:
    if not run.is_first:
        return []
    run.folder.mkdir(parents=True, exist_ok=True)
    values = run.config.model_dump(mode="json")
    (run.folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    drop_rollouts_after(run.folder / "rollouts", summary.step)
    return open_sinks(run.config, run.folder, summary.step)


def _write(sinks: Sequence[Sink], step: int, metrics: Mapping[str, float]) -> None:
    for sink in sinks if metrics else ():
        sink.write(step, metrics)


def _dump(run: Run, report: StepReport) -> None:
    experience = report.experience
    if experience is None or not run.config.observe.rollouts:
        return
    write_rollouts(
        run.folder / "rollouts",
        report.step + 1,
        run.topology.replica,
        experience.groups,
        experience.verdicts,
        experience.credits,
        experience.trained,
        embedded_texts(run, experience),
        experience.entropies(report.entropy_T),
    )

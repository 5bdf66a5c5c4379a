"""Mistakes that span several sections, found before anything expensive starts. Each names the field to change."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator

from megatron_gcpo.cluster.grid import num_replicas, validate
from megatron_gcpo.config import megatron_names
from megatron_gcpo.config.records import Config, SourceConfig


def check(config: Config) -> list[str]:
    """Every problem of a configuration, one readable line each; empty when it is sound."""
    parts = (_run, _model, _cluster, _sources, _batches, _train, _evaluation, _observe)
    return [problem for part in parts for problem in part(config)]


def _run(config: Config) -> Iterator[str]:
    try:
        config.run.output_dir.format(name="", seed=0)
    except (KeyError, IndexError, ValueError):
        yield f"run.output_dir {config.run.output_dir!r} may hold {{name}} and {{seed}}, and no other braces"


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if (model.path is None) == (model.hf_config is None):
        yield "set exactly one of model.path (a checkpoint) and model.hf_config (random weights)"
    if model.hf_config is not None and "model_type" not in model.hf_config:
        yield "model.hf_config has no model_type: add it, e.g. model_type: qwen3"
    if model.path is None and model.tokenizer is None:
        yield "model.tokenizer is missing: without model.path there is no folder to take it from"
    if model.tokenizer == "task" and config.data.train.kind != "task":
        yield 'model.tokenizer: "task" needs data.train.kind: task'


def _cluster(config: Config) -> Iterator[str]:
    rl = config.run.stage == "rl"
    rows = (
        {"prompts_per_step": config.rollout.prompts_per_step}
        if rl
        else {"sft_rows_per_step": config.train.sft_rows_per_step}
    )
    try:
        validate(config.cluster, **rows)
    except ValueError as error:
        yield str(error)
        return
    share = config.rollout.prompts_per_step // num_replicas(config.cluster)
    if rl and share % config.train.mini_batches:
        yield f"train.mini_batches {config.train.mini_batches} does not divide the {share} groups of a replica's step"


def _sources(config: Config) -> Iterator[str]:
    yield from _source("data.train", config.data.train)
    if config.data.heldout is not None:
        yield from _source("data.heldout", config.data.heldout)


def _source(where: str, source: SourceConfig) -> Iterator[str]:
    wanted = "name" if source.kind in ("task", "reasoning_gym") else "path"
    if getattr(source, wanted) is None:
        yield f"{where}.{wanted} is missing: kind {source.kind} needs it"


def _batches(config: Config) -> Iterator[str]:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > config.train.max_tokens_per_micro_batch:
        yield (
            f"one sequence can have {longest} tokens (data.max_prompt_tokens + rollout.max_new_tokens), more than "
            f"train.max_tokens_per_micro_batch {config.train.max_tokens_per_micro_batch}: raise it to at least {longest}"
        )


def _train(config: Config) -> Iterator[str]:
    train = config.train
    for section, options, source in (
        ("optimizer", train.optimizer, megatron_names.OPTIMIZER),
        ("scheduler", train.scheduler, megatron_names.SCHEDULER),
        ("ddp", train.ddp, megatron_names.DDP),
    ):
        known = megatron_names.option_names(*source)
        for name in sorted(options.keys() - known) if known else []:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
            yield f"train.{section}.{name} is not an option of Megatron's {source[1]}: did you mean {near[0]}?"
    rate, warmup = train.optimizer.get("lr"), train.scheduler.get("lr_warmup_steps", 0)
    if not isinstance(rate, int | float):
        found = "missing" if rate is None else repr(rate)
        yield f"train.optimizer.lr is {found}: set the learning rate, e.g. 1.0e-6"
    updates = config.total_updates
    if not isinstance(warmup, int):
        yield f"train.scheduler.lr_warmup_steps is {warmup!r}: set a number of optimizer updates"
    elif "lr_decay_steps" not in train.scheduler and warmup >= updates:
        yield (
            f"train.scheduler.lr_warmup_steps {warmup} is not below the run's {updates} optimizer updates: lower it, or "
            "raise run.steps"
        )


def _evaluation(config: Config) -> Iterator[str]:
    settings = config.evaluate
    if too_large := [k for k in settings.ks if k > settings.samples]:
        yield f"evaluate.ks {too_large} need as many evaluate.samples: raise it from {settings.samples} to {max(too_large)}"
    if config.data.heldout is None and settings.every:
        yield "evaluate.every asks for evaluations, but there is no data.heldout: set it, or evaluate.every=0"


def _observe(config: Config) -> Iterator[str]:
    for package in ("wandb", "mlflow"):
        if getattr(config.observe, package) is not None and importlib.util.find_spec(package) is None:
            yield f"observe.{package} needs the package {package}: pip install {package}, or leave observe.{package} out"
    if unknown := sorted(set(config.observe.mlflow or {}) - {"tracking_uri", "experiment"}):
        yield f"observe.mlflow knows tracking_uri and experiment, not {', '.join(unknown)}"

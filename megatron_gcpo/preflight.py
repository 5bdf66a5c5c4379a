"""What can be known before any process starts: errors that would come late, and the numbers of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from megatron_gcpo.cluster.grid import num_replicas, rank_grid, world_size
from megatron_gcpo.cluster.platform import install
from megatron_gcpo.config.records import Config
from megatron_gcpo.data import PromptSet, RowSampler, load_prompts, load_tokenizer, make_sampler
from megatron_gcpo.data.judged import JudgedSampling
from megatron_gcpo.judge import check_question, question_encoder
from megatron_gcpo.methods import Method, MethodOptions, check_run, longest_sequences, resolve
from megatron_gcpo.observe.summary import Summary
from megatron_gcpo.policy import manifest
from megatron_gcpo.policy.hf_config import check_layout, complete_model, read_hf_config
from megatron_gcpo.policy.source import find_foreign
from megatron_gcpo.resume import check_continuation, find_checkpoint
from megatron_gcpo.rollout.build import check_engine
from megatron_gcpo.rollout.engine import check_fits
from megatron_gcpo.verify.table import create


def preflight(config: Config, folder: Path, *, starts_now: bool = True) -> None:
    """Find the mistakes that need no process: method, verifier, tokenizer, layout, data, lengths, what is in ``folder``.

    Args:
        starts_now: False for a look ahead, when the run that ``model.start_from`` names may be still to come.

    Raises:
        ValueError: what is wrong and which field to change.
    """
    method, options = resolve(config.method)
    if config.run.stage == "rl":
        check_run(method, options, config)
    _check_overlong(options, config.rollout.max_new_tokens)
    create(config.verify.name, config.verify.options)
    checkpoint = find_checkpoint(config, folder)
    tokenizer = load_tokenizer(config.model, config.data.train)
    hf_config = read_hf_config(complete_model(config.model, tokenizer))
    check_layout(hf_config, config.cluster, config.model.megatron)
    check_engine(config, hf_config, cpu=config.cluster.platform == "cpu" or not torch.cuda.is_available())
    start = config.model.start_from if starts_now else None
    if checkpoint is not None:
        found = manifest.read(checkpoint)
        manifest.check_model(found, hf_config, checkpoint)
        manifest.check_lora(found, config.model.lora, checkpoint)
    if start is not None and find_foreign(start) is None:
        path = manifest.resolve_start(start)
        found = manifest.read(path)
        manifest.check_model(found, hf_config, path)
        manifest.check_start(found, config.model.lora, path)
    prompts = load_prompts(config.data.train, config.data, tokenizer)
    if checkpoint is not None:
        check_continuation(config, folder, Summary(**manifest.read_extra(checkpoint)), prompts.fingerprint())
    heldout = None if config.data.heldout is None else load_prompts(config.data.heldout, config.data, tokenizer)
    if config.run.stage == "sft":
        _check_demonstrations(config, prompts, tokenizer, hf_config.max_position_embeddings)
    else:
        _check_sampler(config, options, prompts, tokenizer)
        _check_lengths(config, method, options, prompts, hf_config.max_position_embeddings)
    if heldout is not None:  # no sampler asks about these
        _check_lengths(config, method, MethodOptions(), heldout, hf_config.max_position_embeddings)


def _check_overlong(options: MethodOptions, max_new_tokens: int) -> None:
    overlong = options.overlong
    if overlong is not None and overlong.max_tokens - overlong.buffer >= max_new_tokens:
        raise ValueError(
            f"method.overlong penalizes answers above {overlong.max_tokens - overlong.buffer} tokens (max_tokens - "
            f"buffer), and none has more than rollout.max_new_tokens {max_new_tokens}: set max_tokens to that"
        )


def _check_sampler(config: Config, options: MethodOptions, prompts: PromptSet, tokenizer: Any) -> None:
    make_sampler(
        options.sampler,
        num_prompts=len(prompts),
        prompts_per_step=config.rollout.prompts_per_step,
        seed=config.run.seed,
        num_replicas=num_replicas(config.cluster),
    )
    if isinstance(options.sampler, JudgedSampling):
        check_question(question_encoder(config.data, tokenizer), options.sampler.recent)


def _check_lengths(config: Config, method: Method, options: MethodOptions, prompts: PromptSet, positions: int) -> None:
    longest = max(prompts.prompts, key=lambda prompt: len(prompt.token_ids))
    if method.environment is None:
        check_fits(len(longest.token_ids), config.rollout.max_new_tokens, positions, f"prompt {longest.id!r}")
    for kind in longest_sequences(method, options, config, len(longest.token_ids)):
        if kind.tokens > positions:
            raise ValueError(
                f"{kind.what} about prompt {longest.id!r} can have {kind.tokens} tokens ({kind.made_of}), but the model "
                f"holds {positions} positions: lower rollout.max_new_tokens or data.max_prompt_tokens"
            )


def _check_demonstrations(config: Config, prompts: PromptSet, tokenizer: Any, positions: int) -> None:
    """Without this, a demonstration that fits neither the model nor a micro-batch ends the run when its turn comes."""
    RowSampler(weights_P=prompts.demonstration_weights_P, rows_per_step=1, seed=config.run.seed)  # are there any?
    limit = min(positions, config.train.max_tokens_per_micro_batch)
    pairs = [(p, text) for p, texts in zip(prompts.prompts, prompts.demonstrations_P, strict=True) for text in texts]
    # No tokenizer makes more tokens than bytes; one more is the end of sequence.
    doubtful = [(p, text) for p, text in pairs if len(p.token_ids) + len(text.encode()) + 1 > limit]
    if not doubtful:
        return
    encoded = tokenizer([text for _, text in doubtful], add_special_tokens=False)["input_ids"]
    for (prompt, _), token_ids in zip(doubtful, encoded, strict=True):
        if (length := len(prompt.token_ids) + len(token_ids) + 1) > limit:
            raise ValueError(
                f"prompt {prompt.id!r} and its demonstration have {length} tokens, but the model holds {positions} "
                f"positions and train.max_tokens_per_micro_batch is {config.train.max_tokens_per_micro_batch}: leave "
                "that row out, or raise what limits it"
            )


def describe(config: Config, folder: Path, console: Console) -> None:
    """Print the resolved configuration, the rank grid, parameters per rank and the batch arithmetic."""
    preflight(config, folder, starts_now=False)
    values = config.model_dump(mode="json", exclude_none=True)
    console.print(yaml.safe_dump(values, sort_keys=False), highlight=False, markup=False)
    console.print(_grid(config))
    console.print(_arithmetic(config), highlight=False)


def _grid(config: Config) -> Table:
    platform = install(config.cluster.platform)  # before anything of Megatron is imported, which warns otherwise
    from megatron_gcpo.policy.count import count_parameters

    tokenizer = load_tokenizer(config.model, config.data.train)
    counts = count_parameters(complete_model(config.model, tokenizer), config.cluster, platform)
    table = Table("rank", "replica", "tp", "pp", "cp", "ep", "parameters", title="rank grid", title_justify="left")
    for place, count in zip(rank_grid(config.cluster), counts, strict=True):
        role = " (leader)" if place.is_leader else ""
        cells = (f"{place.replica}{role}", place.tp, place.pp, place.cp, place.ep, f"{count:,}")
        table.add_row(str(place.rank), *map(str, cells))
    return table


def _arithmetic(config: Config) -> str:
    rollout, train, replicas = config.rollout, config.train, num_replicas(config.cluster)
    lines = [f"{world_size(config.cluster)} ranks = {replicas} replicas"]
    if config.run.stage == "sft":
        rows = train.sft_rows_per_step
        lines.append(f"a step: {rows} demonstrations, {rows // replicas} on each replica, 1 update")
    else:
        prompts, group = rollout.prompts_per_step, rollout.group_size
        longest = max(kind.tokens for kind in longest_sequences(*resolve(config.method), config))
        lines += [
            f"a step: {prompts} prompts x {group} rollouts = {prompts * group} sequences, {prompts // replicas} prompts = "
            f"{prompts * group // replicas} sequences on each replica",
            f"updates in a step: {train.mini_batches}, each on {prompts // train.mini_batches} groups",
            f"a sequence: at most {longest} tokens; a micro-batch: {train.max_tokens_per_micro_batch} tokens, at least "
            f"{train.max_tokens_per_micro_batch // longest} sequences",
        ]
    lines.append(f"the run: {config.run.steps} steps, a checkpoint every {config.checkpoint.every}")
    return "\n".join(lines)

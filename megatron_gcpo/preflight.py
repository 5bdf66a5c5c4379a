"""What can be known before any process starts: errors that would come late, and the numbers of a run."""

from __future__ import annotations

import yaml
from rich.console import Console
from rich.table import Table

from megatron_gcpo.cluster.grid import num_replicas, rank_grid, world_size
from megatron_gcpo.cluster.platform import install
from megatron_gcpo.config.records import Config
from megatron_gcpo.data.sources import load_prompts
from megatron_gcpo.data.tokenizer import load_tokenizer
from megatron_gcpo.methods import resolve
from megatron_gcpo.verify.table import create


def preflight(config: Config) -> None:
    """Find the mistakes that need no model: method, verifier, tokenizer, data, prompt lengths.

    Raises:
        ValueError: what is wrong and which field to change.
    """
    resolve(config.method)
    create(config.verify.name, config.verify.options)
    tokenizer = load_tokenizer(config.model, config.data.train)
    prompts = load_prompts(config.data.train, config.data, tokenizer)
    rows = config.rollout.prompts_per_step
    if config.run.stage == "rl" and rows > len(prompts):
        raise ValueError(f"rollout.prompts_per_step {rows} exceeds the {len(prompts)} prompts of data.train: lower it")
    if config.data.heldout is not None:
        load_prompts(config.data.heldout, config.data, tokenizer)


def describe(config: Config, console: Console) -> None:
    """Print the resolved configuration, the rank grid, parameters per rank and the batch arithmetic."""
    preflight(config)
    values = config.model_dump(mode="json", exclude_none=True)
    console.print(yaml.safe_dump(values, sort_keys=False), highlight=False, markup=False)
    console.print(_grid(config))
    console.print(_arithmetic(config), highlight=False)


def _grid(config: Config) -> Table:
    platform = install(config.cluster.platform)  # before anything of Megatron is imported, which warns otherwise
    from megatron_gcpo.policy.count import count_parameters
    from megatron_gcpo.run import complete_model

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
        longest = config.data.max_prompt_tokens + rollout.max_new_tokens
        lines += [
            f"a step: {prompts} prompts x {group} rollouts = {prompts * group} sequences, {prompts // replicas} prompts = "
            f"{prompts * group // replicas} sequences on each replica",
            f"updates in a step: {train.mini_batches}, each on {prompts // train.mini_batches} groups",
            f"a sequence: at most {longest} tokens; a micro-batch: {train.max_tokens_per_micro_batch} tokens, at least "
            f"{train.max_tokens_per_micro_batch // longest} sequences",
        ]
    lines.append(f"the run: {config.run.steps} steps, a checkpoint every {config.checkpoint.every}")
    return "\n".join(lines)

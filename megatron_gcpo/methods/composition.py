"""What may be combined, and why not: asked when a configuration is read.

One advantage estimator and one policy loss are the method's own, and there is one field each for the KL controller, the
sampler and the correction; so two of a kind cannot be written. What is left are combinations that would silently do
nothing, or something else than they say.
"""

from __future__ import annotations

from megatron_gcpo.config.records import Config
from megatron_gcpo.data.curriculum import UniformSampling
from megatron_gcpo.methods.base import Method
from megatron_gcpo.methods.lengths import longest_sequences
from megatron_gcpo.methods.options import MethodOptions
from megatron_gcpo.methods.token_credit.table import TOKEN_CREDITS


def check_options(method: Method, options: MethodOptions) -> None:
    """Raises ValueError for options of one method that do not go together."""
    inside = options.loss.kl_in == "reward" and options.loss.kl_coef > 0
    if options.overlong is not None and method.pays_length:
        raise ValueError(f"method.overlong: {method.name} already pays for length, two rewards would fight: remove it")
    if options.overlong is not None and not method.reads_rewards:
        raise ValueError(f"method.overlong: {method.name} reads no rewards, a penalty on them does nothing: remove it")
    if method.unit == "labels":
        if options.token_credit:
            raise ValueError(
                f"method.token_credit: {method.name} reads labels, not advantages, so there is nothing to weigh: remove it"
            )
        if inside:
            raise ValueError(
                f"method.loss.kl_in: {method.name} replaces advantages, a penalty in them is lost: set loss"
            )
    if method.unit == "sequence":
        if weighing := [part.name for part in options.token_credit if part.name != "kl_cov"]:
            raise ValueError(
                f"method.token_credit: {method.name} has one ratio for a whole answer, over which {weighing[0]} would only be "
                "averaged: remove it, or choose a method with token ratios"
            )
        if inside:
            raise ValueError(
                f"method.loss.kl_in: {method.name} has one advantage for a whole answer, where a penalty for single tokens "
                "cannot go: set loss"
            )


def check_run(method: Method, options: MethodOptions, config: Config) -> None:
    """Raises ValueError for a method that does not go with the rest of the run."""
    updates = config.train.mini_batches
    if method.one_update and updates > 1:
        raise ValueError(
            f"train.mini_batches is {updates}, but the constants of {method.name} are exact for one update only: set it to 1"
        )
    for part in options.token_credit:
        row = TOKEN_CREDITS[part.name]
        if row.updates == "one" and updates > 1:
            raise ValueError(f"train.mini_batches is {updates}, but token_credit {part.name} wants 1: {row.why}")
        if row.updates == "many" and updates == 1:
            raise ValueError(f"token_credit {part.name} needs train.mini_batches above 1: {row.why}")
    lag = config.rollout.max_policy_lag
    if lag and not isinstance(options.sampler, UniformSampling):
        raise ValueError(
            f"method.sampler {options.sampler.name} learns from each step which prompts the next one takes, but "
            f"rollout.max_policy_lag {lag} draws them before: set it to 0, or sampler: uniform"
        )
    if "head_gram" in method.needs and config.cluster.context_parallel_size > 1:
        raise ValueError(
            f"{method.name} compares all tokens of an answer with each other, which context parallelism keeps on different "
            "ranks: set cluster.context_parallel_size to 1"
        )
    _check_room(method, options, config)
    if method.environment is not None and config.rollout.router_replay:
        raise ValueError(
            f"rollout.router_replay wants the experts of every token from one engine call, but {method.name} makes "
            f"{method.environment.num_turns}: set it to false"
        )
    if method.transform is not None and config.rollout.router_replay:
        raise ValueError(
            f"rollout.router_replay wants the engine's experts of every token, but no engine draws the reference solutions of "
            f"{method.name}: set it to false"
        )
    if method.transform is not None and not _has_references(config):
        raise ValueError(
            f"{method.name} puts reference solutions in place of answers, and data.train has none: set "
            "data.train.demonstration_column, or use a task"
        )


def _check_room(method: Method, options: MethodOptions, config: Config) -> None:
    """Raises ValueError where what the method draws does not fit a micro-batch or the engine."""
    for longest in longest_sequences(method, options, config):
        if longest.tokens > config.train.max_tokens_per_micro_batch:
            raise ValueError(
                f"{longest.what} can have {longest.tokens} tokens ({longest.made_of}), more than "
                f"train.max_tokens_per_micro_batch {config.train.max_tokens_per_micro_batch}: raise it to at least "
                f"{longest.tokens}"
            )
        held = config.rollout.vllm.max_model_len
        if config.rollout.engine != "transformers" and held is not None and held < longest.tokens:
            raise ValueError(
                f"{longest.what} can have {longest.tokens} tokens ({longest.made_of}), more than "
                f"rollout.vllm.max_model_len {held}: raise it to at least {longest.tokens}, or leave it out"
            )


def _has_references(config: Config) -> bool:
    source = config.data.train
    return source.demonstration_column is not None or source.kind not in ("jsonl", "parquet", "hf", "reasoning_gym")

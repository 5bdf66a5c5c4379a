"""Mistakes that span several sections, found before anything expensive starts. Each names the field to change."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator

from megatron_gcpo.cluster.grid import num_replicas, validate
from megatron_gcpo.config import megatron_names
from megatron_gcpo.config.records import Config, SourceConfig
from megatron_gcpo.names import nearest

RESERVED_VLLM_OPTIONS = {
    "dtype": "rollout.dtype",
    "enable_sleep_mode": "rollout.vllm.sleep_level",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_gib",
    "load_format": "the first push, which brings the weights",
    "logprobs_mode": "the trainer, which needs log-probs under the sampling distribution",
    "max_model_len": "rollout.vllm.max_model_len",
    "max_num_seqs": "rollout.max_batch_rows",
    "model": "model.path or model.hf_config",
    "quantization": "rollout.quantization",
    "skip_tokenizer_init": "the engine, which speaks token ids",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel_size",
    "weight_transfer_config": "rollout.push.transport",
    "worker_extension_cls": "the pushes, which need their own",
    **dict.fromkeys(
        (
            "enable_lora",
            "fully_sharded_loras",
            "lora_dtype",
            "lora_target_modules",
            "max_cpu_loras",
            "max_lora_rank",
            "max_loras",
        ),
        "rollout.vllm.lora and model.lora",
    ),
}
"""Engine arguments that rollout.vllm.options may not give -> what decides them."""


LORA_TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""What model.lora can adapt: Megatron's name of a matrix -> the Hugging Face matrices in it."""


def check(config: Config) -> list[str]:
    """Every problem of a configuration, one readable line each; empty when it is sound."""
    parts = (
        _run,
        _model,
        _lora,
        _adapters_alone,
        _cluster,
        _sources,
        _batches,
        _rollout,
        _lag,
        _train,
        _evaluation,
        _observe,
    )
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


def _lora(config: Config) -> Iterator[str]:
    lora, tp = config.model.lora, config.cluster.tensor_model_parallel_size
    if lora is None:
        if config.checkpoint.export_merged:
            yield "checkpoint.export_merged is for adapters: leave it out, or set model.lora"
        if config.rollout.vllm.lora:
            yield "rollout.vllm.lora is for adapters: leave it out, or set model.lora"
        return
    if lora.rank % tp:
        yield (
            f"model.lora.rank {lora.rank} cannot be cut over cluster.tensor_model_parallel_size {tp}: set it to "
            f"{-(-lora.rank // tp) * tp}"
        )
    if not lora.target_modules:
        yield f"model.lora.target_modules is empty: name some of {', '.join(LORA_TARGETS)}"
    inside = {name: target for target, names in LORA_TARGETS.items() for name in names}
    for name in lora.target_modules:
        if name in inside:
            yield f"model.lora.target_modules: {name} is a part of Megatron's {inside[name]}: name that"
        elif name not in LORA_TARGETS:
            near = nearest(name, [*LORA_TARGETS, *inside], cutoff=0.0)
            yield (
                f"model.lora.target_modules: {name!r} is none of {', '.join(LORA_TARGETS)}; did you mean "
                f"{inside.get(str(near), near)}?"
            )


def _adapters_alone(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if not rollout.vllm.lora:
        return
    if rollout.engine != "vllm":
        yield (
            f"rollout.vllm.lora goes with rollout.engine vllm: an engine of kind {rollout.engine} takes adapters merged into "
            "the weights; leave it out"
        )
    if rollout.quantization != "none":
        yield (
            f"rollout.vllm.lora does not go with rollout.quantization {rollout.quantization}: adapters are merged before "
            "weights are quantised; leave one of them out"
        )
    if rollout.push.mode == "sharded":
        yield (
            "rollout.push.mode sharded does not go with rollout.vllm.lora, whose first push brings whole tensors: set it to "
            "auto"
        )


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


def _rollout(config: Config) -> Iterator[str]:
    rollout, vllm = config.rollout, config.rollout.vllm
    if rollout.engine == "transformers":
        if rollout.quantization != "none":
            yield (
                f"rollout.quantization {rollout.quantization} needs vLLM: set rollout.engine to vllm or vllm_server, or "
                "rollout.quantization to none"
            )
        return
    if importlib.util.find_spec("vllm") is None and rollout.engine == "vllm":
        yield "rollout.engine vllm needs vLLM: run `make vllm`, or set rollout.engine=transformers"
    temperatures = {"rollout": rollout.temperature, "evaluate": config.evaluate.temperature}
    for section, temperature in temperatures.items():
        if not 0.01 <= temperature <= 2:
            yield f"{section}.temperature {temperature} is not one that vLLM takes: set it from 0.01 to 2"
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    if vllm.max_model_len is not None and vllm.max_model_len < longest:
        yield (
            f"rollout.vllm.max_model_len {vllm.max_model_len} is shorter than a sequence can be: {longest} tokens "
            f"(data.max_prompt_tokens + rollout.max_new_tokens); raise it to at least {longest}, or leave it out"
        )
    replicas = max(1, num_replicas(config.cluster))
    if rollout.engine == "vllm_server" and len(vllm.urls) < replicas:
        yield (
            f"rollout.engine vllm_server needs a URL in rollout.vllm.urls for each of the trainer's {replicas} replicas, "
            f"found {len(vllm.urls)}: add e.g. http://127.0.0.1:8000"
        )
    for url in vllm.urls:
        if not re.fullmatch(r"https?://[^/?#\s]+/?", url):
            yield f"rollout.vllm.urls: {url!r} is no base URL of a server: write http://host:port"
    if len(set(vllm.urls)) < len(vllm.urls):
        yield "rollout.vllm.urls names a server twice: list each once"
    if rollout.engine == "vllm" and vllm.urls:
        yield "rollout.vllm.urls belongs to rollout.engine vllm_server: set that engine, or leave the URLs out"
    for name in sorted(vllm.options.keys() & RESERVED_VLLM_OPTIONS.keys()):
        yield f"rollout.vllm.options.{name} is decided by {RESERVED_VLLM_OPTIONS[name]}: leave it out"


def _lag(config: Config) -> Iterator[str]:
    rollout, kind = config.rollout, config.correction_kind
    if config.run.stage != "rl":
        return
    cuts = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0}
    if kind != "none" and any(cuts.values()):
        yield (
            f"correction.kind {kind} compares log-probs over the whole vocabulary, but rollout."
            f"{next(name for name, cut in cuts.items() if cut)} draws from a part of it: leave that out, or set "
            "correction.kind: none"
        )
    low, high = config.correction_bounds
    if not low < 1 < high:
        yield (
            f"correction.low {low:g} and correction.high {high:g} must have 1 between them, the ratio of two equal "
            "policies: correct them, or leave them out"
        )
    asleep = rollout.engine == "vllm" and rollout.vllm.sleep_level > 0 and config.cluster.platform == "cuda"
    if rollout.max_policy_lag and asleep:
        yield (
            f"rollout.max_policy_lag {rollout.max_policy_lag} draws while the trainer trains, but a colocated engine of "
            f"rollout.vllm.sleep_level {rollout.vllm.sleep_level} sleeps then: set it to 0, or use rollout.engine vllm_server"
        )
    if rollout.max_policy_lag >= config.run.steps > 0:
        yield (
            f"rollout.max_policy_lag {rollout.max_policy_lag} is as long as the run of {config.run.steps} steps, whose "
            "rollouts would all come from the first policy: lower it"
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
            near = nearest(name, known, cutoff=0.0)
            yield f"train.{section}.{name} is not an option of Megatron's {source[1]}: did you mean {near}?"
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

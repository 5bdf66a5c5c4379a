"""All layouts of a recipe on some GPUs, each judged: what fits, what is fastest, and how the recipe's own one does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_gcpo.cluster.grid import world_size
from megatron_gcpo.cluster.platform import Platform
from megatron_gcpo.config.records import ClusterConfig, Config
from megatron_gcpo.methods import resolve
from megatron_gcpo.plan.hardware import GPUS_PER_NODE, Efficiency, Gpu
from megatron_gcpo.plan.layouts import Plan, legal_layouts, make_plans, own_cluster, rough_bytes
from megatron_gcpo.plan.memory import Workload, workload
from megatron_gcpo.plan.parameters import StageParameters, count_stages
from megatron_gcpo.plan.shape import Shape
from megatron_gcpo.policy.count import smallest
from megatron_gcpo.policy.hf_config import PLACES_LAYERS


@dataclass(frozen=True, kw_only=True)
class Question:
    """A recipe whose step is known; how often its parameters are counted is kept low over several searches."""

    config: Config
    platform: Platform
    work: Workload
    old_logprobs: bool
    """Whether a forward pass precedes the update."""
    counted: dict[str, tuple[Shape, tuple[StageParameters, ...]]] = field(default_factory=dict)

    def count(self, cluster: ClusterConfig) -> tuple[Shape, tuple[StageParameters, ...]]:
        """``count_stages``, once for all layouts that cut the model alike."""
        key = str(smallest(cluster))
        if key not in self.counted:
            self.counted[key] = count_stages(self.config.model, cluster, self.platform)
        return self.counted[key]


def ask(config: Config, platform: Platform, mean_prompt_tokens: int | None, mean_new_tokens: int | None) -> Question:
    """The question that a recipe poses, whose model's configuration must be at hand. Without means, see ``workload``.

    Raises:
        ValueError: the recipe asks for what the trainer refuses.
    """
    if config.cluster.context_parallel_size > 1:
        raise ValueError(
            f"cluster.context_parallel_size {config.cluster.context_parallel_size}: the trainer runs without context "
            "parallelism only, so there is nothing to plan; set it to 1"
        )
    method, options = resolve(config.method)
    needs = method.needs_for(options)
    train = config.train
    return Question(
        config=config,
        platform=platform,
        work=workload(config, mean_new_tokens, mean_prompt_tokens, "ref_logprobs" in needs),
        old_logprobs=train.mini_batches > 1 or train.old_logprobs == "always" or "old_logprobs" in needs,
    )


def with_hf_config(config: Config, path: str | Path) -> Config:
    """The recipe with its model's configuration read from a file, where the hub cannot be reached.

    Raises:
        ValueError: the file is not there, or no JSON.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--hf-config {path} cannot be read as JSON ({error})") from None
    model = config.model.model_copy(update={"path": None, "hf_config": values, "tokenizer": "none"})
    return config.model_copy(update={"model": model})


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the layouts on a number of GPUs are like."""

    question: Question
    num_gpus: int
    gpu: Gpu
    whole: StageParameters
    """The model uncut."""
    num_legal: int
    plans: tuple[Plan, ...]
    """Of every layout that could fit, and of the recipe's own."""

    @property
    def fitting(self) -> list[Plan]:
        """The best size of engine for each layout that fits, fastest first."""
        groups: dict[str, list[Plan]] = {}
        for plan in self.plans:
            if plan.fits:
                groups.setdefault(str(plan.cluster), []).append(plan)
        return sorted((min(g, key=lambda p: p.duration.total) for g in groups.values()), key=lambda p: p.duration.total)

    @property
    def own(self) -> Plan | None:
        """The recipe's own layout, where it is one of this many GPUs."""
        return next((plan for plan in self.plans if plan.is_own), None)

    @property
    def closest(self) -> Plan | None:
        """What needs least memory; None when all layouts are far from fitting."""
        return min(self.plans, key=lambda p: p.needed, default=None)

    def refusal(self) -> str:
        """Why nothing fits, and what to change."""
        hint = f" (the closest, {self.closest.name}: {self.closest.shortage})" if self.closest else ""
        return (
            f"no layout fits{hint}: use more GPUs, recompute activations (model.megatron.recompute_granularity: full), "
            "lower train.max_tokens_per_micro_batch, or serve from other GPUs (rollout.engine: vllm_server)"
        )


def search(question: Question, num_gpus: int, gpu: Gpu, efficiency: Efficiency) -> Answer:
    """Memory and time of every layout whose weights, gradients and optimizer state alone would fit.

    Raises:
        ValueError: the GPUs are no whole nodes, or no layout divides model, GPUs and prompts.
    """
    config = question.config
    if num_gpus > GPUS_PER_NODE and num_gpus % GPUS_PER_NODE:
        raise ValueError(f"--gpus {num_gpus} is no whole number of nodes of {GPUS_PER_NODE}: use a multiple of it")
    shape, whole = _uncut(question)
    own = own_cluster(config)
    layouts = list(legal_layouts(config, shape, num_gpus))
    if world_size(own) == num_gpus and own not in layouts:
        layouts.append(own)
    if not layouts:
        raise ValueError(
            f"no layout of {num_gpus} GPUs divides {shape.heads} heads, {shape.num_layers} layers and "
            f"{config.rollout.prompts_per_step} prompts: change --gpus or rollout.prompts_per_step"
        )
    plans: list[Plan] = []
    for cluster in layouts:
        if cluster == own or rough_bytes(config, cluster, whole) < gpu.memory_bytes:
            plans += make_plans(
                config, cluster, question.count(cluster), question.work, gpu, efficiency, question.old_logprobs
            )
    return Answer(
        question=question, num_gpus=num_gpus, gpu=gpu, whole=whole, num_legal=len(layouts), plans=tuple(plans)
    )


def _uncut(question: Question) -> tuple[Shape, StageParameters]:
    """The model on one rank, wherever the recipe would put its layers."""
    if "uncut" not in question.counted:
        model = question.config.model
        megatron = {name: value for name, value in model.megatron.items() if name not in PLACES_LAYERS}
        plain = model.model_copy(update={"megatron": megatron})
        question.counted["uncut"] = count_stages(plain, ClusterConfig(), question.platform)
    shape, (whole,) = question.counted["uncut"]
    return shape, whole


def fastest(plans: Sequence[Plan], count: int) -> list[Plan]:
    """The first ``count`` plans, and the recipe's own if it is further down."""
    return [*plans[:count], *(plan for plan in plans[count:] if plan.is_own)]

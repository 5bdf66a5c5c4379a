"""Which layout fits, and how long a step takes, before any GPU is asked for.

    python tools/plan_run.py configs/recipe/qwen3_32b_math.yaml --gpus 64 --gpu h100
    python tools/plan_run.py RECIPE [section.field=value ...] --gpus 16 --gpu h200 --explain

Parameters are counted on the real Megatron model, built without memory for each layout that could fit. Times are
products of FLOP and byte counts with assumed efficiencies (``--explain`` prints every one; ``--efficiency train=0.45``
changes one): a way to compare layouts, not a promise. Runs on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megatron_gcpo.cluster.platform import install
from megatron_gcpo.config import Config, load
from megatron_gcpo.plan.hardware import GIB, GPUS, GPUS_PER_NODE, Efficiency

if TYPE_CHECKING:
    from megatron_gcpo.plan.layouts import Plan


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        _plan(arguments, Console())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(arguments: argparse.Namespace, console: Console) -> None:
    config = load(arguments.recipe, arguments.overrides)
    if arguments.gpus > GPUS_PER_NODE and arguments.gpus % GPUS_PER_NODE:
        raise ValueError(
            f"--gpus {arguments.gpus} is no whole number of nodes of {GPUS_PER_NODE}: use a multiple of it"
        )
    efficiency = _efficiency(arguments.efficiency)
    platform = install("auto")  # before anything of Megatron is imported, which warns otherwise
    from megatron_gcpo.data import load_tokenizer
    from megatron_gcpo.methods import resolve
    from megatron_gcpo.plan.layouts import legal_layouts, make_plans, rough_bytes
    from megatron_gcpo.plan.memory import workload
    from megatron_gcpo.plan.parameters import count_stages
    from megatron_gcpo.policy.hf_config import complete_model

    method, options = resolve(config.method)
    needs = method.needs_for(options)
    if arguments.hf_config is not None:
        config = _with_config(config, arguments.hf_config)
    elif config.model.path is None:
        model = complete_model(config.model, load_tokenizer(config.model, config.data.train))
        config = config.model_copy(update={"model": model})
    gpu = GPUS[arguments.gpu]
    work = workload(config, arguments.mean_new_tokens, arguments.mean_prompt_tokens, "ref_logprobs" in needs)
    alone = config.cluster.model_copy(
        update={
            "platform": "auto",
            "num_nodes": 1,
            "processes_per_node": 1,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": None,
            "sequence_parallel": False,
        }
    )
    shape, (whole,) = count_stages(config.model, alone, platform)
    old_logprobs = config.train.mini_batches > 1 or config.train.old_logprobs == "always" or "old_logprobs" in needs
    layouts = list(legal_layouts(config, shape, arguments.gpus))
    if not layouts:
        raise ValueError(
            f"no layout of {arguments.gpus} GPUs divides {shape.heads} heads, {shape.num_layers} layers and "
            f"{config.rollout.prompts_per_step} prompts: change --gpus or rollout.prompts_per_step"
        )
    hopeful = [c for c in layouts if rough_bytes(config, c, shape, (whole.dense, whole.expert)) < gpu.memory_bytes]
    hopeful.sort(key=lambda c: rough_bytes(config, c, shape, (whole.dense, whole.expert)))
    plans = [
        plan
        for cluster in hopeful
        for plan in make_plans(
            config, cluster, count_stages(config.model, cluster, platform), work, gpu, efficiency, old_logprobs
        )
    ]
    best = [min(group, key=lambda p: p.duration.total) for group in _by_layout([p for p in plans if p.fits])]
    fitting = sorted(best, key=lambda p: p.duration.total)
    console.print(
        f"{whole.total / 1e9:.2f} B parameters ({whole.expert / 1e9:.2f} B in experts); {len(layouts)} legal layouts on "
        f"{arguments.gpus} x {gpu.name}, {len(fitting)} fit {gpu.memory_bytes / GIB:.0f} GiB less "
        f"{100 * efficiency.reserve:.0f} % reserve",
        highlight=False,
    )
    console.print(
        f"a step: {work.sequences} sequences of {work.prompt_tokens} + {work.new_tokens} tokens (means assumed: half of "
        "what is allowed, unless --mean-prompt-tokens and --mean-new-tokens say otherwise)",
        highlight=False,
    )
    if not fitting:
        closest = min(plans, key=lambda p: p.memory.peak) if plans else None
        hint = f"; the closest, {closest.name}, needs {closest.memory.peak / GIB:.1f} GiB" if closest else ""
        raise ValueError(
            f"no layout fits{hint}: use more GPUs, recompute activations (model.megatron.recompute_granularity: full), "
            "lower train.max_tokens_per_micro_batch, or serve from other GPUs (rollout.engine: vllm_server)"
        )
    console.print(_table(fitting[: arguments.top], work.tokens, gpu.flops, arguments.gpus))
    if arguments.explain:
        console.print(_explain(fitting[0]), highlight=False)


def _with_config(config: Config, path: str) -> Config:
    """The recipe with its model's configuration read from a file, where the hub cannot be reached."""
    import json
    from pathlib import Path

    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--hf-config {path} cannot be read as JSON ({error})") from None
    model = config.model.model_copy(update={"path": None, "hf_config": values, "tokenizer": "none"})
    return config.model_copy(update={"model": model})


def _efficiency(given: Sequence[str]) -> Efficiency:
    known = {field.name for field in dataclasses.fields(Efficiency)}
    values = {}
    for pair in given:
        name, _, value = pair.partition("=")
        try:
            values[name] = float(value)
        except ValueError:
            values[name] = -1.0
        if name not in known or not 0 < values[name] <= 1:
            raise ValueError(
                f"--efficiency {pair}: write NAME=SHARE with a share in (0, 1] of {', '.join(sorted(known))}"
            )
    return Efficiency(**values)


def _by_layout(plans: Sequence[Plan]) -> list[list[Plan]]:
    groups: dict[str, list[Plan]] = {}
    for plan in plans:
        groups.setdefault(str(plan.cluster), []).append(plan)
    return list(groups.values())


def _table(plans: Sequence[Plan], tokens: int, flops: float, gpus: int) -> Table:
    """A column for each layout, best first: GiB of its fullest rank, then seconds of a step."""
    table = Table(title="best layouts", title_justify="left")
    table.add_column("")
    for plan in plans:
        table.add_column(plan.name.replace(" ", "\n"), justify="right")
    for kind in plans[0].memory.kinds:
        if any(plan.memory.kinds[kind] for plan in plans):
            table.add_row(f"{kind}, GiB", *(f"{plan.memory.kinds[kind] / GIB:.1f}" for plan in plans))
    table.add_row("peak, GiB", *(f"{plan.memory.peak / GIB:.1f}" for plan in plans), end_section=True)
    for phase in plans[0].duration.phases:
        table.add_row(f"{phase}, s", *(f"{plan.duration.phases[phase]:.1f}" for plan in plans))
    table.add_row("step, s", *(f"{plan.duration.total:.1f}" for plan in plans), end_section=True)
    table.add_row("tokens/s/GPU", *(f"{tokens / plan.duration.total / gpus:.0f}" for plan in plans))
    shares = [plan.duration.train_flops / (plan.duration.total * flops * gpus) for plan in plans]
    table.add_row("MFU of the step", *(f"{100 * share:.1f}%" for share in shares))
    return table


def _explain(plan: Plan) -> str:
    lines = [f"{plan.name}, stage {plan.memory.stage}"]
    for phase, kinds in plan.memory.phases.items():
        parts = " + ".join(f"{kind} {plan.memory.kinds[kind] / GIB:.2f}" for kind in kinds)
        lines.append(
            f"  memory in {phase}: {parts} = {plan.memory.phase_bytes()[phase] / GIB:.2f} GiB of {plan.room / GIB:.1f}"
        )
    return "\n".join([*lines, *(f"  {line}" for line in plan.duration.explained)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="section.field=value, as for megatron-gcpo train")
    parser.add_argument("--gpus", type=int, required=True, help="in all; above 8, whole nodes of 8")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h100")
    parser.add_argument("--hf-config", help="config.json of the model, where its hub id cannot be reached")
    parser.add_argument("--mean-prompt-tokens", type=int)
    parser.add_argument("--mean-new-tokens", type=int)
    parser.add_argument("--efficiency", nargs="*", default=[], metavar="NAME=SHARE")
    parser.add_argument("--top", type=int, default=5, help="layouts to print")
    parser.add_argument("--explain", action="store_true", help="print the arithmetic of the best layout")
    return parser


if __name__ == "__main__":
    sys.exit(main())

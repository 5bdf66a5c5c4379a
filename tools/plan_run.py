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
from megatron_gcpo.config import load
from megatron_gcpo.plan.hardware import GIB, GPUS, Efficiency
from megatron_gcpo.usage import exit_code, make_console

if TYPE_CHECKING:
    from megatron_gcpo.plan.layouts import Plan


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return exit_code(lambda: _plan(arguments, make_console()))


def _plan(arguments: argparse.Namespace, console: Console) -> None:
    config = load(arguments.recipe, arguments.overrides)
    efficiency = _efficiency(arguments.efficiency)
    platform = install("auto")  # before anything of Megatron is imported, which warns otherwise
    from megatron_gcpo.data import load_tokenizer
    from megatron_gcpo.plan.search import ask, fastest, search, with_hf_config
    from megatron_gcpo.policy.hf_config import complete_model

    if arguments.hf_config is not None:
        config = with_hf_config(config, arguments.hf_config)
    elif config.model.path is None:
        model = complete_model(config.model, load_tokenizer(config.model, config.data.train))
        config = config.model_copy(update={"model": model})
    question = ask(config, platform, arguments.mean_prompt_tokens, arguments.mean_new_tokens)
    gpu, work = GPUS[arguments.gpu], question.work
    answer = search(question, arguments.gpus, gpu, efficiency)
    fitting, whole = answer.fitting, answer.whole
    console.print(
        f"{whole.total / 1e9:.2f} B parameters ({whole.expert / 1e9:.2f} B in experts); {answer.num_legal} legal layouts "
        f"on {arguments.gpus} x {gpu.name}, {len(fitting)} fit {gpu.memory_bytes / GIB:.0f} GiB less "
        f"{100 * efficiency.reserve:.0f} % reserve",
        highlight=False,
    )
    console.print(
        f"a step: {work.sequences} sequences of {work.prompt_tokens} + {work.new_tokens} tokens (means assumed: half of "
        "what is allowed, unless --mean-prompt-tokens and --mean-new-tokens say otherwise)",
        highlight=False,
    )
    own = answer.own
    if own is not None and not own.fits:
        console.print(f"the recipe's own layout, {own.name}, does not fit: {own.shortage}", highlight=False)
    if not fitting:
        raise ValueError(answer.refusal())
    console.print(_table(fastest(fitting, arguments.top), work.tokens, gpu.flops, arguments.gpus))
    if arguments.explain:
        console.print(_explain(fitting[0]), highlight=False)


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


def _table(plans: Sequence[Plan], tokens: int, flops: float, gpus: int) -> Table:
    """A column for each layout, best first: GiB of its fullest rank, then seconds of a step."""
    table = Table(title="best layouts", title_justify="left")
    table.add_column("")
    for plan in plans:
        own = "\n(recipe)" if plan.is_own else ""
        table.add_column(plan.name.replace(" ", "\n") + own, justify="right")
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

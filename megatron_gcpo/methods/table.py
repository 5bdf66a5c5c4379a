"""The table of methods as documentation: ``python -m megatron_gcpo.methods.table`` writes it into README.md.

What stands outside the two markers is written by hand; a test compares the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_gcpo.data.judged import JudgedSampling
from megatron_gcpo.methods.base import Method, clipped_surrogate
from megatron_gcpo.methods.options import LossOptions, MethodOptions
from megatron_gcpo.methods.resolve import FAMILIES

README = Path(__file__).with_name("README.md")
OVERHEAD = Path(__file__).with_name("overhead.json")
"""Measured by tools/bench_methods.py: name -> milliseconds of phase one, credit and loss on one batch."""
BEGIN, END = "<!-- methods: begin -->\n", "<!-- methods: end -->\n"
COLUMNS = (
    "`method.name`",
    "paper",
    "in one line",
    "verified, and ours",
    "what it plugs into",
    "options of its own",
    "cost",
)


def rendered() -> str:
    """README.md with the table of now."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + "\n".join(_families()) + "\n" + END + after


def _families() -> Iterator[str]:
    measured = json.loads(OVERHEAD.read_text(encoding="utf-8"))
    for family, methods in FAMILIES.items():
        yield f"### {family[0].upper()}{family[1:]}\n"
        yield "| " + " | ".join(COLUMNS) + " |"
        yield "|" + "---|" * len(COLUMNS)
        for method in methods:
            yield "| " + " | ".join(_cells(method, measured)) + " |"
        yield ""


def _cells(method: Method, measured: dict[str, float]) -> tuple[str, ...]:
    options = method.options()
    paper = f"[{method.arxiv}](https://arxiv.org/abs/{method.arxiv})" if method.arxiv else "-"
    extra = [
        n
        for n in ("embeddings", "all_embeddings", "old_logprobs", "head_gram", "ref_logprobs")
        if n in method.needs_for(options)
    ]
    names = {"embeddings": "embeddings", "all_embeddings": "embeddings of all rollouts"}
    names |= {"old_logprobs": "a log-prob pass", "ref_logprobs": "a reference pass"}
    names |= {"head_gram": "gradients of the output layer in it"}
    turns = [f"{method.environment.num_turns} turns of generation"] if method.environment else []
    asked = ["one short answer about each candidate"] if isinstance(options.sampler, JudgedSampling) else []
    passes = ", ".join([*turns, *asked, *(names[n] for n in extra)])
    time = measured.get(method.name)
    cost = "; ".join(filter(None, (f"{time:+.1f} ms" if time is not None else "", passes)))
    return (
        f"`{method.name}`",
        paper,
        method.summary,
        method.evidence,
        ", ".join(_points(method, options)),
        ", ".join(_own_options(options)) or "-",
        cost or "-",
    )


def _points(method: Method, options: MethodOptions) -> Iterator[str]:
    """The extension points that the method fills with something of its own."""
    yield "credit"
    if method.environment is not None:
        yield f"environment ({method.environment.name})"
    if method.steps is not None:
        yield "steps"
    if method.transform is not None:
        yield "transform"
    if method.prepare is not None:
        yield "prepare"
    if options.token_credit:
        yield "token_credit"
    if method.policy_loss is not clipped_surrogate:
        yield f"policy_loss ({method.unit})" if method.unit != "token" else "policy_loss"
    if options.loss.kl_controller.name != "fixed":
        yield "kl_controller"
    if options.sampler.name != "uniform":
        yield "sampler"


def _own_options(options: MethodOptions) -> Iterator[str]:
    """Every option that differs from what all methods have, with its default."""
    base = MethodOptions()
    for name in type(options).model_fields:
        value = getattr(options, name)
        if name == "loss":
            yield from (
                f"loss.{field} {_shown(getattr(value, field))}"
                for field in LossOptions.model_fields
                if getattr(value, field) != getattr(base.loss, field)
            )
        elif name not in MethodOptions.model_fields or value != getattr(base, name):
            yield f"{name} {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    name = value.name if hasattr(value, "name") else value
    return str(name).lower() if isinstance(name, bool) else f"`{name}`" if isinstance(name, str) else f"{name}"


if __name__ == "__main__":
    README.write_text(rendered(), encoding="utf-8")

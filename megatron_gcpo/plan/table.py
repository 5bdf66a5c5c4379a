"""README.md of this folder: what the planner says of the shipped recipes for large models.

python -m megatron_gcpo.plan.table        # from the repository's root; minutes on one core, no GPU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_gcpo.cluster.grid import world_size
from megatron_gcpo.cluster.platform import install
from megatron_gcpo.config import load
from megatron_gcpo.plan.hardware import GIB, GPUS, GPUS_PER_NODE, Efficiency, Gpu
from megatron_gcpo.plan.layouts import Plan, make_plans, own_cluster
from megatron_gcpo.plan.search import Answer, Question, ask, search, with_hf_config

ROOT = Path(__file__).parents[2]
README = Path(__file__).parent / "README.md"
KINDS = ("h100", "h200")
NODES: Mapping[str, Sequence[int]] = {
    "qwen3_30b_a3b_math": (1, 2, 4, 8),
    "qwen3_32b_math": (1, 2, 4, 8, 16),
    "llama3_3_70b_math": (2, 4, 8, 16, 32),
    "qwen3_235b_a22b_math": (8, 16, 32, 64),
}
"""Recipe -> sizes that are looked at, in nodes of eight GPUs."""
MEAN_PROMPT_TOKENS, MEAN_NEW_TOKENS = 256, 3000

HEAD = f"""# Plans

Which layout of a large run fits, and how long its steps should take, before any GPU is asked for. Nothing here was
measured on a GPU. This page is written by `python -m megatron_gcpo.plan.table`; the same numbers for any other recipe,
size or assumption, with the arithmetic behind them:

    python tools/plan_run.py configs/recipe/qwen3_32b_math.yaml --gpus 32 --gpu h100 --explain \\
        --mean-prompt-tokens {MEAN_PROMPT_TOKENS} --mean-new-tokens {MEAN_NEW_TOKENS}

(`--hf-config configs/hf_config/qwen3_32b.json` where the model hub cannot be reached.)

- **Exact**: parameters of every pipeline stage, counted on the real Megatron model built without memory; with them the
  bytes of weights, gradients and optimizer state, which a test compares with what a real actor holds.
- **Derived**: activations, what is in flight while a layer is differentiated, the output layer's logits, KV cache and
  push buckets, from the shapes of the model and of the step; FLOP and bytes of each phase likewise. On the CPU, with
  Megatron's own layers, a test compares the peak of a whole update with the tensors that really are there (5 %). For
  Transformer Engine's layers the derivation is not compared with anything.
- **Assumed**: the shares of the data sheet below that a run reaches, and the length of answers: a mean of
  {MEAN_NEW_TOKENS} tokens after prompts of {MEAN_PROMPT_TOKENS}. Answers are long or short with the policy, and a step waits
  for its longest one, which is not modelled: read the times as a way to compare layouts, not as a promise.
- A planner's layout has an engine in each replica, on the replica's own GPUs, with whole experts, sequence parallelism
  wherever tensors are cut, and no context parallelism, which the trainer refuses. Experts are assumed to be met evenly.
"""


def main() -> None:
    """Write the page."""
    sections = [HEAD, assumptions(Efficiency())]
    for name in NODES:
        question = question_of(name)
        sections += [own_section(name, question), sizes_section(name, question)]
    README.write_text("\n".join(sections), encoding="utf-8")


def question_of(name: str) -> Question:
    """What a shipped recipe asks; its model's configuration is a file beside it."""
    config = load(ROOT / "configs" / "recipe" / f"{name}.yaml", [])
    config = with_hf_config(config, ROOT / "configs" / "hf_config" / f"{name.removesuffix('_math')}.json")
    return ask(config, install("auto"), MEAN_PROMPT_TOKENS, MEAN_NEW_TOKENS)


def assumptions(efficiency: Efficiency) -> str:
    """The data sheets and the shares of them."""
    sheet = [
        (
            gpu.name.upper(),
            f"{gpu.memory_bytes / GIB:.1f}",
            f"{gpu.flops / 1e12:.0f}",
            f"{gpu.memory_bandwidth / 1e12:.2f}",
            f"{gpu.link_bandwidth / 1e9:.0f}",
            f"{gpu.network_bandwidth / 1e9:.0f}",
        )
        for gpu in GPUS.values()
    ]
    head = ("GPU", "usable GiB", "bf16 TFLOP/s", "memory TB/s", "NVLink GB/s", "network GB/s")
    shares = [
        ("dense products of the trainer", f"{efficiency.train:.0%} of the FLOP/s"),
        ("products of experts", f"{efficiency.experts:.0%} of the FLOP/s"),
        ("an engine reading prompts", f"{efficiency.prefill:.0%} of the FLOP/s"),
        ("an engine drawing tokens", f"{efficiency.decode:.0%} of the memory bandwidth"),
        ("pushes of weights", f"{efficiency.copy:.0%} of NVLink or network"),
        ("contexts, communication, fragmentation", f"{efficiency.reserve:.0%} of the memory kept free"),
    ]
    return "\n".join([*_table(head, sheet), "", *_table(("what", "assumed share"), shares), ""])


def own_section(name: str, question: Question) -> str:
    """The recipe's own layout on each kind of GPU: memory of the fullest rank by kind and by phase, seconds by phase."""
    config = question.config
    cluster = own_cluster(config)
    counted = question.count(cluster)
    plans = [
        plan
        for kind in KINDS
        for plan in make_plans(config, cluster, counted, question.work, GPUS[kind], Efficiency(), question.old_logprobs)
        if plan.is_own
    ]
    memory, phases = plans[0].memory, plans[0].memory.phase_bytes()
    rows = [
        (kind, *(f"{p.memory.kinds[kind] / GIB:.1f}" for p in plans))
        for kind in memory.kinds
        if any(p.memory.kinds[kind] for p in plans)
    ]
    rows += [(f"**in {phase}**", *(f"{p.memory.phase_bytes()[phase] / GIB:.1f}" for p in plans)) for phase in phases]
    rows.append(("**fits**", *("yes" if p.fits else f"no: {p.shortage}" for p in plans)))
    spent = [p.duration if p.fits else None for p in plans]
    rows += [
        (f"{phase}, s", *("" if s is None else f"{s.phases[phase]:.1f}" for s in spent))
        for phase in plans[0].duration.phases
    ]
    rows.append(("**step, s**", *("" if s is None else f"{s.total:.1f}" for s in spent)))
    gpus = world_size(cluster)
    lines = [
        f"## {name}",
        "",
        f"Its own layout, {plans[0].name}, on {gpus // GPUS_PER_NODE} nodes ({gpus} GPUs); GiB of its fullest rank, which is "
        f"of stage {memory.stage}:",
        "",
    ]
    return "\n".join([*lines, *_table(("GiB", *(k.upper() for k in KINDS)), rows), ""])


def sizes_section(name: str, question: Question) -> str:
    """The fastest layout that fits at each size, and the recipe's own one."""
    head = (
        "nodes",
        "GPU",
        "fit / legal",
        "layout",
        "peak GiB",
        "cache GiB",
        "generate s",
        "learn s",
        "step s",
        "tokens/s/GPU",
    )
    rows: list[tuple[str, ...]] = []
    for nodes in NODES[name]:
        for kind in KINDS:
            answer = search(question, nodes * GPUS_PER_NODE, GPUS[kind], Efficiency())
            rows += _size_rows(nodes, GPUS[kind], answer)
    return "\n".join(
        ["The fastest layout of each size (*learn*: old log-probs and update):", "", *_table(head, rows), ""]
    )


def _size_rows(nodes: int, gpu: Gpu, answer: Answer) -> Iterator[tuple[str, ...]]:
    fitting = answer.fitting
    first = (str(nodes), gpu.name.upper(), f"{len(fitting)} / {answer.num_legal}")
    if not fitting:
        why = f": {answer.closest.shortage}" if answer.closest else ""
        yield (*first, f"none{why}", *[""] * 6)
        return
    yield (*first, fitting[0].name, *_numbers(fitting[0], answer))
    own = answer.own
    if own is not None and own.fits:
        yield (*first, f"**{own.name}** (the recipe's own)", *_numbers(own, answer))


def _numbers(plan: Plan, answer: Answer) -> tuple[str, ...]:
    spent = plan.duration
    rate = answer.question.work.tokens / spent.total / answer.num_gpus
    return (
        f"{plan.memory.peak / GIB:.1f}",
        f"{plan.memory.kinds['KV cache'] / GIB:.1f}",
        f"{spent.phases['generate']:.0f}",
        f"{spent.phases['update'] + spent.phases['logprobs']:.0f}",
        f"{spent.total:.0f}",
        f"{rate:.0f}",
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    main()

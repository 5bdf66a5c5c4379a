"""What a method costs beyond GRPO on the CPU, apart from forward passes and embeddings: credit, phase one and the token loss.

    python tools/bench_methods.py [--write]

One step's batch of 16 groups of 8 rollouts of 256 tokens, given log-probabilities, entropies and embeddings of 384 numbers;
half of the rollouts are right. Times are process time, the best of several runs, one thread. ``--write`` puts them into
megatron_gcpo/methods/overhead.json and the table of megatron_gcpo/methods/README.md.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import numpy as np
import torch

from megatron_gcpo.credit.tokens import rollout_batch
from megatron_gcpo.methods import EMBEDDING_NEEDS, METHODS, Method, prepare, without_unsampled
from megatron_gcpo.methods.phase import alone
from megatron_gcpo.methods.table import OVERHEAD, README, rendered
from megatron_gcpo.types import CreditInputs, Group, Prompt, Rollout, Steps, TokenStats, Turns

GROUPS, ROLLOUTS, TOKENS, EMBEDDING_SIZE = 16, 8, 256, 384
TEXT = " ".join(f"word{i}" for i in range(TOKENS // 2)) + " \\boxed{1}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="into the documentation")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds = {name: best(method, arguments.repeats) for name, method in METHODS.items()}
    extra = {name: round(1000 * (value - seconds["grpo"]), 1) for name, value in seconds.items()}
    print(f"grpo: {1000 * seconds['grpo']:.1f} ms; beyond it:")
    for name, value in extra.items():
        print(f"  {name:24s} {value:+7.1f} ms")
    if arguments.write:
        OVERHEAD.write_text(json.dumps(extra, indent=1) + "\n", encoding="utf-8")
        README.write_text(rendered(), encoding="utf-8")


def best(method: Method, repeats: int) -> float:
    """Seconds of the fastest of several steps."""
    rng = np.random.default_rng(0)
    groups, inputs = [], []
    options = method.options()
    needs = method.needs_for(options)
    for p in range(GROUPS):
        rollouts = [_rollout(rng) for _ in range(ROLLOUTS)]
        groups.append(Group(prompt=Prompt(id=str(p), token_ids=(1, 2), text="", answer=""), rollouts=tuple(rollouts)))
        rows = torch.from_numpy(rng.normal(size=(ROLLOUTS, EMBEDDING_SIZE)))
        rows = torch.nn.functional.normalize(rows + rows[:1], dim=1)
        inputs.append(
            CreditInputs(
                rewards_G=torch.arange(ROLLOUTS).remainder(2).double(),
                embeddings_GD=rows.float() if needs & EMBEDDING_NEEDS else None,
                lengths_G=torch.full((ROLLOUTS,), TOKENS),
                logprobs_G=torch.from_numpy(rng.normal(size=ROLLOUTS)),
                texts_G=(TEXT,) * ROLLOUTS,
                turns=_turns(),
                steps=Steps(
                    rewards_GK=torch.arange(4 * ROLLOUTS).view(ROLLOUTS, 4).remainder(3).clamp(max=1).double(),
                    step_of_token_G=(torch.arange(TOKENS) // (TOKENS // 4),) * ROLLOUTS,
                ),
            )
        )
    return min(_step(method, groups, inputs) for _ in range(repeats))


def _step(method: Method, groups: list[Group], inputs: list[CreditInputs]) -> float:
    options = method.options()
    begun = time.process_time()
    credits = [method.credit(own, options) for own in inputs]
    credited = time.process_time() - begun
    batch = rollout_batch(groups, credits)
    generator = torch.Generator().manual_seed(0)
    old_T = -torch.rand(len(batch.tokens_T), generator=generator)
    second_T = torch.rand(len(old_T), generator=generator)
    stats = TokenStats(
        logprobs_T=old_T, entropy_T=-2 * old_T, sum_p2_T=second_T, sum_p2_logp_T=-second_T, head_gram_T=second_T
    )
    batch = replace(batch, old_logprobs_T=old_T, ref_logprobs_T=old_T - 0.1, scalars={"accuracy": 0.5})
    batch = without_unsampled(batch)
    current_T = (old_T + 0.01).requires_grad_()
    begun = time.process_time()
    batch, _, _ = prepare(method, options, batch, stats, {}, alone())
    loss_T, _ = method.token_loss(replace(stats, logprobs_T=current_T), batch, options)
    loss_T.sum().backward()
    return credited + time.process_time() - begun


def _turns() -> Turns:
    rewards_G = torch.arange(ROLLOUTS)
    return Turns(
        rewards_GK=torch.stack([rewards_G // 2 % 2, rewards_G % 2], dim=1).double(),
        lengths_GK=torch.full((ROLLOUTS, 2), TOKENS // 2),
        texts_GK=((TEXT, TEXT),) * ROLLOUTS,
    )


def _rollout(rng: np.random.Generator) -> Rollout:
    return Rollout(
        token_ids=rng.integers(0, 1000, TOKENS),
        logprobs=-rng.random(TOKENS).astype(np.float32),
        text="",
        finish_reason="stop",
        versions_T=np.zeros(TOKENS, dtype=np.int32),
    )


if __name__ == "__main__":
    main()

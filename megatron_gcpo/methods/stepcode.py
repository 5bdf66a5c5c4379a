"""StepCodeReasoner: credit for every predicted value of a program's run (arXiv 2605.11922).

A program carries trace points, and the answer has to state what each of them prints before it states the result. Running
the program says which statements are right: r_i of step i, with the result as the last step n. Two advantages are added on
the tokens of a step,

    A_i = A_group(i) + lambda A_intra(i),    A_group: r_i, standardized within the group
    A_intra(i) = r_i (1 + mean of r_j over the later steps j), for the last one r_n

so a right value counts more when what follows from it is right too, and a right result after a wrong trace less than one
after a consistent trace. Problems without a program have the one step that GRPO knows.

Verified second-hand: both advantages and lambda. Ours: where a step ends (the line that states the value), population
std. The paper first trains on annotated traces (run.stage: sft).
"""

from __future__ import annotations

import torch
from pydantic import Field

from megatron_gcpo.data.trace import instrument
from megatron_gcpo.environments.steps import Claim
from megatron_gcpo.methods.base import Method, clipped_surrogate, penalized_rewards, standardized
from megatron_gcpo.methods.grpo import GrpoOptions
from megatron_gcpo.types import Credit, CreditInputs, Prompt


class StepcodeOptions(GrpoOptions):
    intra: float = Field(default=0.3, ge=0)
    """lambda: weight of the advantage within an answer."""


def split(prompt: Prompt, text: str) -> tuple[Claim, ...]:
    """What the answer states of each trace point: lines "name: value", looked for in the order of the points."""
    code = prompt.extras.get("code")
    if not isinstance(code, str):
        return ()
    lines, end = [], 0
    for line in text.splitlines(keepends=True):
        end += len(line)
        lines.append((end, line.strip().strip("`")))
    claims, place, last = [], 0, 0
    for name in instrument(code).names:
        found = next((i for i in range(place, len(lines)) if lines[i][1].startswith(f"{name}:")), None)
        if found is None:
            claims.append(Claim(end=last, text=""))
            continue
        place, last = found + 1, lines[found][0]
        claims.append(Claim(end=last, text=lines[found][1].partition(":")[2].strip()))
    return tuple(claims)


def within(rewards_GK: torch.Tensor) -> torch.Tensor:
    """[G, K] float64 A_intra."""
    later_GK = rewards_GK.flip(1).cumsum(1).flip(1) - rewards_GK
    left_K = torch.arange(rewards_GK.shape[1] - 1, -1, -1, dtype=torch.float64)
    return rewards_GK * (1 + later_GK / left_K.clamp(min=1))


def credit(inputs: CreditInputs, options: StepcodeOptions) -> Credit:
    """Advantages of steps on their tokens; of a rollout, for the group filter, the mean of its steps'."""
    if inputs.steps is None:
        raise ValueError(
            "stepcode pays the steps of an answer, and these rollouts were judged as a whole: use another method"
        )
    rewards_GK = inputs.steps.rewards_GK.clone()
    rewards_GK[:, -1] = inputs.rewards_G
    group_GK = torch.stack([standardized(column_G) for column_G in rewards_GK.T], dim=1)
    advantages_GK = group_GK + options.intra * within(rewards_GK)
    return Credit(
        credits_G=rewards_GK.mean(1),
        advantages_G=advantages_GK.mean(1),
        token_advantages_G=tuple(
            own_K[step_T] for own_K, step_T in zip(advantages_GK, inputs.steps.step_of_token_G, strict=True)
        ),
        metrics={"right_steps_share": rewards_GK.mean().item(), "steps": float(rewards_GK.shape[1])},
    )


METHOD = Method(
    name="stepcode",
    arxiv="2605.11922",
    summary="every predicted value of a traced program earns its own advantage, more if what follows is right",
    evidence="second-hand: both advantages, lambda; ours: where a step ends",
    options=StepcodeOptions,
    credit=credit,
    steps=split,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

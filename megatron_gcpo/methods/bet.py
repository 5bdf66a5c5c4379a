"""BET: budgets that follow solvability (arXiv 2605.11625).

Before it thinks, the policy predicts how solvable a problem is and what share of its token limit the answer will take;
it may fold, by boxing "Unsolvable". With s the group's share of correct answers, c* the mean of the shortest 30% of
their lengths and b* = min(1, c* / limit), a rollout earns

    value        correct 1; wrong -0.2 min(1, len / limit); folded 0.1 where nobody is correct, else -0.8
    efficiency   0.3 max(0, 1 - len / c*) if correct and s > 0.25, so that a lone success may be long
    calibration  some correct: -0.1 |s_hat - s| - 0.2 l, l = 2 |b_hat - b*| below b*, |b_hat - b*| above
                 none correct: -0.2 s_hat - 0.1 b_hat

and is standardized within its group. A missing prediction counts as 0.5. So giving up early beats failing, failing beats
giving up on what can be solved, and length is paid for only where there is slack.

Verified in the authors' code: the three rewards. Reconstruction: the wording of the protocol, which configs/method/bet.yaml
puts into data.system_prompt, and the size of the reward for keeping to it. The paper first trains the protocol in by
supervised learning (run.stage: sft on such texts).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from pydantic import Field, PositiveInt

from megatron_gcpo.methods.base import Method, clipped_surrogate, penalized_rewards, standardized
from megatron_gcpo.methods.grpo import GrpoOptions
from megatron_gcpo.types import Credit, CreditInputs
from megatron_gcpo.verify.verifiers.extract import last_boxed, normalise

SHORTEST_SHARE = 0.3
MISSING = 0.5
FOLD = "unsolvable"
_NUMBER = r"\s*[:=]\s*([01](?:\.\d{0,9})?|\.\d{1,9})\s*"
_PREDICTION = re.compile(rf"<predict>\s*solvability{_NUMBER},?\s*budget{_NUMBER}</predict>", re.IGNORECASE)
# A prediction comes before the thinking.
_HEAD_CHARACTERS = 400


class BetOptions(GrpoOptions):
    max_tokens: PositiveInt = 16384
    """The limit that budgets are shares of, usually rollout.max_new_tokens."""
    format_reward: float = Field(default=0.1, ge=0)
    """For a readable prediction and a boxed answer."""
    positive_at: float = Field(default=0.5, gt=0, le=1)
    """Least reward of a correct answer."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """What an answer says beyond its result."""

    solvability: float | None
    """Predicted, in [0, 1]; None: no readable prediction."""
    budget: float | None
    folds: bool
    boxed: bool


def read(text: str) -> Said:
    """The prediction at the head of a completion and whether its last box folds. Total."""
    found = _PREDICTION.search(text[:_HEAD_CHARACTERS])
    numbers = [float(n) for n in found.groups()] if found else []
    valid = bool(numbers) and all(0 <= n <= 1 for n in numbers)
    boxed = last_boxed(text)
    return Said(
        solvability=numbers[0] if valid else None,
        budget=numbers[1] if valid else None,
        folds=boxed is not None and normalise(boxed) == FOLD,
        boxed=boxed is not None,
    )


def shortest_correct(lengths_G: torch.Tensor, correct_G: torch.Tensor) -> float | None:
    """c*: mean length of the shortest ceil(30%) correct answers; None where there is none."""
    lengths_K = lengths_G[correct_G].double().sort().values
    if not len(lengths_K):
        return None
    return lengths_K[: max(1, math.ceil(SHORTEST_SHARE * len(lengths_K)))].mean().item()


def value(length: int, correct: bool, folds: bool, solvable: bool, limit: int) -> float:
    if correct:
        return 1.0
    if folds:
        return -0.8 if solvable else 0.1
    return -0.2 * min(1.0, length / limit)


def efficiency(length: int, correct: bool, share: float, best: float | None) -> float:
    return 0.3 * max(0.0, 1 - length / best) if correct and best is not None and share > 0.25 else 0.0


def calibration(said: Said, share: float, best: float | None, limit: int) -> float:
    solvability = MISSING if said.solvability is None else said.solvability
    budget = MISSING if said.budget is None else said.budget
    if best is None:
        return -0.2 * solvability - 0.1 * budget
    gap = budget - min(1.0, best / limit)
    return -0.1 * abs(solvability - share) - 0.2 * (-2 * gap if gap < 0 else gap)


def rewards(inputs: CreditInputs, said: list[Said], options: BetOptions) -> torch.Tensor:
    """[G] float64 in [-1.3, 1.4]: value + efficiency + calibration + format."""
    correct_G = inputs.rewards_G >= options.positive_at
    share, best = correct_G.double().mean().item(), shortest_correct(inputs.lengths_G, correct_G)
    paid = []
    for length, correct, own in zip(inputs.lengths_G.tolist(), correct_G.tolist(), said, strict=True):
        formal = options.format_reward * float(own.solvability is not None and own.boxed)
        paid.append(
            value(length, correct, own.folds, best is not None, options.max_tokens)
            + efficiency(length, correct, share, best)
            + calibration(own, share, best, options.max_tokens)
            + formal
        )
    return torch.tensor(paid, dtype=torch.float64)


def credit(inputs: CreditInputs, options: BetOptions) -> Credit:
    """The group's rewards, standardized."""
    assert inputs.texts_G is not None, "got no texts, expected the completions of the group"
    said = [read(text) for text in inputs.texts_G]
    rewards_G = rewards(inputs, said, options)
    return Credit(
        credits_G=rewards_G,
        advantages_G=standardized(rewards_G),
        metrics={
            "fold_share": sum(own.folds for own in said) / len(said),
            "predicted_share": sum(own.solvability is not None for own in said) / len(said),
        },
    )


METHOD = Method(
    name="bet",
    arxiv="2605.11625",
    summary="predict solvability and budget, fold the unsolvable, be short where the group can afford it",
    evidence="authors' code: value, efficiency, calibration; reconstruction: protocol's wording, format reward",
    options=BetOptions,
    credit=credit,
    pays_length=True,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

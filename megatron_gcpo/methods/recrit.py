"""ReCrit: a second answer after a critic, paid for what it changed (arXiv 2605.18799).

The policy answers, a critic who knows nothing of the result replies (environments/critic.py), and the policy answers
again. A pair of adjacent turns earns 1 for wrong -> right, 0.6 for right -> right, -1 for right -> wrong and -0.1 for
wrong -> wrong, so that correcting oneself and standing one's ground are told apart, which a reward for the final answer
alone cannot do. Small terms are added, each times 0.2: repetition, in [-1, 0] from repeated 8-grams; overlength, in [-1, 0]
over the last ``buffer`` tokens of a turn's limit; and 1 for a <think> block followed by an answer. The sum is normalized by
the group's mean and sample std. The critic's tokens are never trained.

Verified in the authors' code: transitions, weights, sample std. Ours: the critic's wordings, one critic for a group,
repetition as the share of 8-grams of words that occurred before, no KL term by default (paper: k3, 0.04: set loss.kl_coef).

The authors end a step's rollouts once 75 % of the conversations are complete, keep every group that was started, and pad
the rest with rows that are not trained: their conversations advance each by itself, and a step would wait for the slowest.
Here all conversations take each turn together (environments/play.py), in one engine call of at most max_new_tokens
decoding steps. When it returns, every conversation that was started has that turn; none is left to be skipped or padded,
and the baseline is over all rows of a group. To cut a call short at 75 % instead would drop the answers that the engine
happens to finish last, which depends on its load and its layout: the same seeds would no longer give the same rollouts.
"""

from __future__ import annotations

import re

import torch
from pydantic import Field, PositiveInt, model_validator

from megatron_gcpo.environments.critic import CRITIC
from megatron_gcpo.methods.base import STD_EPSILON, Method, centred, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.grpo import GrpoOptions
from megatron_gcpo.types import Credit, CreditInputs, Turns

NGRAM = 8
SIDE_WEIGHT = 0.2
REPAIRED, HELD, BROKEN, LOST = 1.0, 0.6, -1.0, -0.1
_THINKS = re.compile(r"\s*<think>.*?</think>\s*\S", re.DOTALL)


class RecritOptions(GrpoOptions):
    max_tokens: PositiveInt = 4096
    """Length of a turn at which overlength counts fully, usually rollout.max_new_tokens."""
    buffer: PositiveInt = 1024
    """Overlength grows linearly over the last ``buffer`` tokens before max_tokens."""
    positive_at: float = Field(default=0.5, gt=0, le=1)
    """Least reward of a correct turn."""

    @model_validator(mode="after")
    def _fits(self) -> RecritOptions:
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer {self.buffer} is larger than max_tokens {self.max_tokens}: lower it")
        return self


def transitions(correct_GK: torch.Tensor) -> torch.Tensor:
    """[G] float64 mean over adjacent turns. correct_GK: [G, turns] bool."""
    before, after = correct_GK[:, :-1], correct_GK[:, 1:]
    values = torch.where(after, torch.where(before, HELD, REPAIRED), torch.where(before, BROKEN, LOST))
    return values.double().mean(1)


def repetition(text: str) -> float:
    """Minus the share of 8-grams of words that occurred before; 0 for shorter texts."""
    words = text.split()
    grams = [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    return -(1 - len(set(grams)) / len(grams)) if grams else 0.0


def thinks(text: str) -> float:
    """1 for a closed <think> block at the beginning and an answer after it, else 0."""
    return float(_THINKS.match(text) is not None)


def rewards(turns: Turns, options: RecritOptions) -> torch.Tensor:
    """[G] float64 in [-1.4, 1.2]."""
    over_GK = -((turns.lengths_GK.double() - (options.max_tokens - options.buffer)) / options.buffer).clamp(0, 1)
    manner_GK = torch.tensor(
        [[repetition(text) + thinks(text) for text in texts] for texts in turns.texts_GK], dtype=torch.float64
    )
    return transitions(turns.rewards_GK >= options.positive_at) + SIDE_WEIGHT * (over_GK + manner_GK).mean(1)


def credit(inputs: CreditInputs, options: RecritOptions) -> Credit:
    """A = (R - mean R) / (sample std R + 1e-4). ValueError where there are no turns, as in rollouts saved for replay."""
    if inputs.turns is None:
        raise ValueError(
            "recrit pays what a critic's turn changed, and these rollouts have one turn: use another method"
        )
    rewards_G = rewards(inputs.turns, options)
    centred_G = centred(rewards_G)
    spread = (centred_G.square().sum() / (len(centred_G) - 1)).sqrt()
    first_G, last_G = (inputs.turns.rewards_GK[:, k] >= options.positive_at for k in (0, -1))
    return Credit(
        credits_G=rewards_G,
        advantages_G=centred_G / (spread + STD_EPSILON),
        metrics={
            "first_turn_correct": first_G.double().mean().item(),
            "repaired_share": (~first_G & last_G).double().mean().item(),
            "broken_share": (first_G & ~last_G).double().mean().item(),
        },
    )


METHOD = Method(
    name="recrit",
    arxiv="2605.18799",
    summary="a second answer after a critic, paid for what it repaired or broke",
    evidence="authors' code: transitions, weights, sample std; ours: critic's wordings, repetition measure",
    options=RecritOptions,
    credit=credit,
    environment=CRITIC,
    pays_length=True,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

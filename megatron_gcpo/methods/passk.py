"""Pass@k training (arXiv 2508.10751).

The reward of a set of k answers is whether any of them is right, and an answer's advantage is the mean standardized
reward of the sets it belongs to. Over all sets of a group of G with W wrong ones this has a closed form: with R = 1 -
C(W, k) / C(G, k) and sigma = sqrt(R (1 - R)),

    right: (1 - R) / sigma        wrong: (1 - R - C(W - 1, k - 1) / C(G - 1, k - 1)) / sigma

Hard questions are pushed hardest, and a question with fewer than k wrong answers is left alone.

The closed form is the paper's; 1e-4 added to sigma and the rest of GRPO are ours.
"""

from __future__ import annotations

from math import comb, sqrt

from pydantic import Field, PositiveInt

from megatron_gcpo.methods.base import STD_EPSILON, Method, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.grpo import GrpoOptions
from megatron_gcpo.types import Credit, CreditInputs


class PassKOptions(GrpoOptions):
    k: PositiveInt = 4
    """Answers of a set; at most rollout.group_size."""
    positive_at: float = Field(default=0.5, gt=0, le=1)
    """Least reward of a right answer."""


def credit(inputs: CreditInputs, options: PassKOptions) -> Credit:
    """Advantages by the closed form. Errors: ValueError for k above the group's size."""
    size, k = len(inputs.rewards_G), options.k
    check_k(k, size)
    right_G = inputs.rewards_G >= options.positive_at
    wrong = size - int(right_G.sum())
    solved = 1 - comb(wrong, k) / comb(size, k)
    spread = sqrt(solved * (1 - solved)) + STD_EPSILON
    lost = comb(wrong - 1, k - 1) / comb(size - 1, k - 1) if wrong else 0.0
    advantages_G = (1 - solved - lost * (~right_G).double()) / spread
    return Credit(credits_G=inputs.rewards_G, advantages_G=advantages_G, metrics={"set_reward": solved})


def check_k(k: int, size: int) -> None:
    """Refuse sets that a group cannot fill."""
    if size < 2:
        raise ValueError("a group of one rollout has no baseline to compare with: set rollout.group_size to 2 or more")
    if k > size:
        raise ValueError(
            f"method.k is {k}, more than the {size} rollouts of a group: lower it, or raise rollout.group_size"
        )


METHOD = Method(
    name="passk",
    arxiv="2508.10751",
    summary="mean standardized reward of the sets of k answers that an answer belongs to",
    evidence="paper: the closed form; ours: 1e-4 on sigma",
    options=PassKOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

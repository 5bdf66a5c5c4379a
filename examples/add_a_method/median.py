"""A method of your own in one file: GRPO with the median as its baseline.

With binary rewards and more than half of a group right, the mean lies below the typical answer; the median is the typical
answer, so a right one is paid nothing and only the wrong ones move. (An exercise: no paper, no claim.)
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from megatron_gcpo.methods import METHODS
from megatron_gcpo.methods.grpo import GrpoOptions
from megatron_gcpo.types import Credit, CreditInputs


class MedianOptions(GrpoOptions):
    """Everything GRPO has, and one option more."""

    scale: float = Field(default=1.0, gt=0)
    """Multiplies every advantage."""


def credit(inputs: CreditInputs, options: MedianOptions) -> Credit:
    """A = scale x (r - median r): one number for each rollout of a group, from what a method may look at."""
    # quantile and not median(): of an even number, the mean of the two in the middle
    advantages_G = options.scale * (inputs.rewards_G - inputs.rewards_G.quantile(0.5))
    return Credit(credits_G=inputs.rewards_G, advantages_G=advantages_G)


METHOD = replace(
    METHODS["grpo"],
    name="median",
    arxiv="",
    summary="reward against the group's median",
    evidence="an exercise",
    options=MedianOptions,
    credit=credit,
)

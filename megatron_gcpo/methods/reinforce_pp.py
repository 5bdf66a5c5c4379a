"""REINFORCE++ (arXiv 2501.03262).

A baseline and a scale from one group of answers are noisy and can be gamed by easy questions. REINFORCE++ takes
neither: the reward, less a KL penalty for each token still to come, is normalized over the tokens of the whole step.
With one normalizer for all questions the estimate is biased less and less as the step grows. The loss is PPO's clipped
surrogate.

Ours to choose: the statistics are over trained tokens, the KL penalty is off until loss.kl_coef is set (it then goes
into the reward, with estimator k1, as in the paper), and 1e-6 is added to the std.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import model_validator

from megatron_gcpo.methods.base import LossOptions, Method, MethodOptions, clipped_surrogate, penalized_rewards
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.types import Credit, CreditInputs, TokenBatch, TokenStats

EPSILON = 1e-6


class ReinforcePpLoss(LossOptions):
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    kl_in: Literal["loss", "reward"] = "reward"


class ReinforcePpOptions(MethodOptions):
    loss: ReinforcePpLoss = ReinforcePpLoss()

    @model_validator(mode="after")
    def _no_filter(self) -> ReinforcePpOptions:
        if self.group_filter:
            raise ValueError(
                "group_filter asks for the signal of a group by itself, but advantages are normalized over the step: set "
                "group_filter: false, or use reinforce_pp_baseline"
            )
        return self


def credit(inputs: CreditInputs, options: MethodOptions) -> Credit:
    """The reward itself; ``prepare`` normalizes it."""
    return Credit(credits_G=inputs.rewards_G, advantages_G=inputs.rewards_G)


def prepare(batch: TokenBatch, stats: TokenStats, options: MethodOptions, state: State, scope: Scope) -> Prepared:
    """(A - mean A) / (std A + 1e-6) over the trained tokens of all replicas."""
    mean, std = scope.mean(batch.advantages_T, batch.mask_T)
    advantages_T = (batch.advantages_T.double() - mean) / (std + EPSILON)
    advantages_T = torch.where(batch.mask_T > 0, advantages_T, 0).float()
    return Prepared(batch=replace(batch, advantages_T=advantages_T), metrics={"advantage_std": std})


METHOD = Method(
    name="reinforce_pp",
    arxiv="2501.03262",
    summary="reward less KL to come, normalized over the whole step instead of a group",
    evidence="paper: global normalization, KL in the reward; ours: token-weighted statistics",
    options=ReinforcePpOptions,
    credit=credit,
    prepare=prepare,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

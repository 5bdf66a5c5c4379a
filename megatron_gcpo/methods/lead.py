"""LEAD: how much length counts follows from how unstable it is (arXiv 2605.09806).

A correct answer is also paid for a length near the group's own: with L* the mean length of its correct answers, within
bounds, r_len = max(-1, 1 - |len - L*| / L*). Correctness and length are each standardized within the group and mixed,
A = lambda_c A_c + lambda_l A_l, and the mixture is whitened over the step. The weights follow what still moves: the
coefficient of variation of each reward (length over correct answers only) times what it has left to gain, (1 - mean
correctness) and (1 - mean (r_len + 1) / 2), both to the power a, normalized, smoothed by an EMA that starts at one
half each and is saved with every checkpoint. Correctness never weighs less than 0.3.

Verified in the authors' code: all of it. Ours: population std, 1e-4 as everywhere, whitening over trained tokens, weights that
stay where they are while no answer is correct or nothing varies. The paper's KL weight (0.0005, squared log-ratio) is
off by default because it needs a reference policy: loss.kl_coef 0.0005, kl_estimator k2.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import Field, PositiveInt, model_validator

from megatron_gcpo.loss.rows import on_tokens, trained_tokens
from megatron_gcpo.methods.base import Method, clipped_surrogate, penalized_rewards, standardized
from megatron_gcpo.methods.grpo import GrpoOptions
from megatron_gcpo.methods.phase import Prepared, Scope, State
from megatron_gcpo.types import Credit, CreditInputs, TokenBatch, TokenStats

START = 0.5
WHITENING_EPSILON = 1e-6


class LeadOptions(GrpoOptions):
    shortest: PositiveInt = 1000
    """Least L*, tokens."""
    longest: PositiveInt = 8000
    """Largest L*, tokens; also L* of a group without a correct answer."""
    power: float = Field(default=1.0, ge=0)
    """a: how fast a reward loses weight as it nears its maximum."""
    smoothing: float = Field(default=0.95, ge=0, lt=1)
    """Share of the old weights in the EMA."""
    least: float = Field(default=0.3, ge=0, le=1)
    """Least weight of correctness."""
    positive_at: float = Field(default=0.5, gt=0, le=1)
    """Least reward of a correct answer."""

    @model_validator(mode="after")
    def _fits(self) -> LeadOptions:
        if self.shortest > self.longest:
            raise ValueError(f"shortest {self.shortest} is above longest {self.longest}: lower it")
        if self.group_filter:
            raise ValueError(
                "group_filter asks for the signal of a group by itself, but advantages are whitened over the step: set "
                "group_filter: false"
            )
        return self


def length_rewards(lengths_G: torch.Tensor, correct_G: torch.Tensor, options: LeadOptions) -> torch.Tensor:
    """[G] float64 in [-1, 1]: 1 at L*, -1 from 2 L* on. lengths_G: [G] tokens; correct_G: [G] bool."""
    lengths_G = lengths_G.double()
    target = float(options.longest)
    if correct_G.any():
        target = min(max(lengths_G[correct_G].mean().item(), options.shortest), options.longest)
    return (1 - (lengths_G - target).abs() / target).clamp(min=-1)


def credit(inputs: CreditInputs, options: LeadOptions) -> Credit:
    """Both standardized rewards, half each until phase one knows the weights; parts: r, r_len, correct, A_c, A_l."""
    correct_G = inputs.rewards_G >= options.positive_at
    length_G = length_rewards(inputs.lengths_G, correct_G, options)
    own_G, length_A_G = standardized(inputs.rewards_G), standardized(length_G)
    return Credit(
        credits_G=inputs.rewards_G,
        advantages_G=START * own_G + (1 - START) * length_A_G,
        parts_GK=torch.stack([inputs.rewards_G, length_G, correct_G.double(), own_G, length_A_G], dim=1),
        metrics={"length_reward": length_G.mean().item()},
    )


def _moments(values_N: torch.Tensor, taken_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """[4] float64 over groups with a taken row: how many, sum of means, of squared means, of variances within."""
    sums_4 = torch.zeros(4, dtype=torch.float64)
    for group in group_N.unique():
        own = values_N[(group_N == group) & taken_N]
        if len(own):
            mean = own.mean()
            sums_4 += torch.stack([torch.ones_like(mean), mean, mean.square(), own.var(correction=0)])
    return sums_4


def instability(sums_4: torch.Tensor) -> tuple[float, float]:
    """(mean, total std / |mean|): variance within groups plus variance of their means; (0, 0) for no group or mean 0."""
    count, mean, square, within = sums_4.tolist()
    if count == 0 or mean == 0:
        return 0.0, 0.0
    mean, square, within = mean / count, square / count, within / count
    return mean, max(within + square - mean * mean, 0.0) ** 0.5 / abs(mean)


def prepare(batch: TokenBatch, stats: TokenStats, options: LeadOptions, state: State, scope: Scope) -> Prepared:
    """The mixture under the step's weights, whitened over the trained tokens of all replicas."""
    parts_NK = torch.zeros(0, 5, dtype=torch.float64) if batch.parts_NK is None else batch.parts_NK
    rewards_N, length_N, correct_N, own_N, length_A_N = parts_NK.unbind(1)
    present_N = trained_tokens(batch) > 0
    sums_8 = torch.cat(
        [
            _moments(rewards_N, present_N, batch.group_N),
            _moments(length_N, present_N & (correct_N > 0), batch.group_N),
        ]
    )
    sums_8 = scope.sum(sums_8)
    correctness, varies = instability(sums_8[:4])
    efficiency, length_varies = instability(sums_8[4:])
    pull = varies * (1 - correctness) ** options.power
    length_pull = length_varies * (1 - (efficiency + 1) / 2) ** options.power
    weight = state.get("correctness", START)
    if sums_8[4] > 0 and pull + length_pull > 0:
        weight = options.smoothing * weight + (1 - options.smoothing) * pull / (pull + length_pull)
    used = max(weight, options.least)
    mixed_T = on_tokens(used * own_N + (1 - used) * length_A_N, batch)
    mean, std = scope.mean(mixed_T, batch.mask_T)
    advantages_T = torch.where(batch.mask_T > 0, (mixed_T - mean) / (std + WHITENING_EPSILON), 0).float()
    return Prepared(
        batch=replace(batch, advantages_T=advantages_T),
        state={"correctness": weight},
        metrics={"lead_correctness_weight": used, "lead_efficiency": efficiency},
    )


METHOD = Method(
    name="lead",
    arxiv="2605.09806",
    summary="correctness and nearness to the group's own length, weighted by what still varies",
    evidence="authors' code: rewards, weights, EMA, floor; ours: whitening over tokens",
    options=LeadOptions,
    credit=credit,
    prepare=prepare,
    pays_length=True,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

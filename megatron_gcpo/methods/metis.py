"""METIS: the policy says which prompts will teach it something, and is paid for being right (arXiv 2605.11235).

A prompt is informative where the rewards of its group vary. Before a step the policy is asked about several times as many
candidates as the step takes, with the last three outcomes (a prompt and its variance) for examples: it reasons shortly and
boxes a forecast v_hat of the variance v. The step trains on the candidates with the largest forecasts, and the forecasts
are trained with it,

    L = L_policy + 0.01 L_judge,    L_judge = REINFORCE on R = 1 - (4 (v_hat - v))^2 with a moving-average baseline

(a weight of 1 would teach the policy to answer 0.25 to everything). Advantages are not divided by the group's spread.

Verified second-hand: v, the three examples, the choice, R, the baseline, the weight, no std. Ours: two candidates a prompt,
the wording, forecasts that cannot be read earn 0 and count as 0.125, a baseline that starts at the first step's mean and
keeps 0.9 of itself, which rows L_judge is a mean over (forecasts whose prompt was visited, and unreadable ones), PPO's
clip in L_policy and its token mean, which L_judge shares.

All of it but the advantage is the sampler ``judged`` (data/judged.py, judge.py), which goes with every other method too.
"""

from __future__ import annotations

from megatron_gcpo.data.curriculum import SamplerOptions
from megatron_gcpo.data.judged import JudgedSampling
from megatron_gcpo.methods.base import Method, MethodOptions, centred, clipped_surrogate, penalized_rewards
from megatron_gcpo.types import Credit, CreditInputs


class MetisOptions(MethodOptions):
    sampler: SamplerOptions = JudgedSampling()


def credit(inputs: CreditInputs, options: MethodOptions) -> Credit:
    """A = r - mean r."""
    return Credit(credits_G=inputs.rewards_G, advantages_G=centred(inputs.rewards_G))


METHOD = Method(
    name="metis",
    arxiv="2605.11235",
    summary="the policy forecasts what each candidate prompt will teach, trains on the best, and is paid for the forecast",
    evidence="second-hand: forecast, reward, weights, no std; ours: number of candidates, wording, what L_judge is a mean over",
    options=MetisOptions,
    credit=credit,
    shape_rewards=penalized_rewards,
    policy_loss=clipped_surrogate,
)

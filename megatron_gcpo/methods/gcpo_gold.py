"""GCPO with golden answers (the contrastive GCPO of arXiv 2510.07790; not the cooperative one of gcpo).

A group whose answers are all wrong teaches nothing under GRPO. Here one of its wrong answers is replaced by a reference
solution with reward 1, and the group is then normalized as usual, by mean and sample std: among 16, the reference gets
3.75 and the others -0.25. The importance ratio is the answer's, as in GSPO, and there is no KL term.

The rule is verified. Our reconstruction: the clipped GSPO form of the ratio with GSPO's range, and which answer goes
(the longest, then the first). No engine drew the reference, so its log-probabilities are the trainer's.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_gcpo.methods.base import STD_EPSILON, Method, centred, penalized_rewards
from megatron_gcpo.methods.gspo import GspoOptions, policy_loss
from megatron_gcpo.types import Credit, CreditInputs, Group, Rollout, Verdicts


def transform(
    group: Group, verdict: Verdicts, reference: Rollout | None, options: GspoOptions
) -> tuple[Group, Verdicts]:
    """One wrong answer replaced by the reference where all are wrong and there is one; else as it was."""
    if reference is None or verdict.rewards_G.any():
        return group, verdict
    lengths = [len(rollout.token_ids) for rollout in group.rollouts]
    place = lengths.index(max(lengths))
    rollouts, statuses, rewards_G = list(group.rollouts), list(verdict.statuses_G), verdict.rewards_G.copy()
    rollouts[place], statuses[place], rewards_G[place] = reference, "ok", 1.0
    return replace(group, rollouts=tuple(rollouts)), Verdicts(rewards_G=rewards_G, statuses_G=tuple(statuses))


def credit(inputs: CreditInputs, options: GspoOptions) -> Credit:
    """A = (r - mean r) / (sample std r + 1e-4)."""
    centred_G = centred(inputs.rewards_G)
    spread = (centred_G.square().sum() / (len(centred_G) - 1)).sqrt()
    return Credit(credits_G=inputs.rewards_G, advantages_G=centred_G / (spread + STD_EPSILON))


METHOD = Method(
    name="gcpo_gold",
    arxiv="2510.07790",
    summary="a reference solution in place of one answer where all are wrong; sequence ratio",
    evidence="summary: the replacement, sequence ratio, no KL; reconstruction: clipped GSPO form, which answer goes",
    options=GspoOptions,
    credit=credit,
    needs=frozenset({"old_logprobs"}),
    transform=transform,
    unit="sequence",
    shape_rewards=penalized_rewards,
    policy_loss=policy_loss,
)

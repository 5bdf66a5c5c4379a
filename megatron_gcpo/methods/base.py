"""What a method is: a frozen record of pure functions and the type of its options; the trainer knows nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_gcpo.environments.base import Environment
from megatron_gcpo.environments.steps import Split
from megatron_gcpo.loss.kl import KL_ESTIMATORS
from megatron_gcpo.loss.surrogate import ppo_clip
from megatron_gcpo.methods.kl import FixedKl
from megatron_gcpo.methods.options import LossOptions, MethodOptions, OverlongOptions
from megatron_gcpo.methods.phase import Prepare
from megatron_gcpo.methods.token_credit.table import TOKEN_CREDITS
from megatron_gcpo.types import Credit, CreditInputs, Group, Rollout, TokenBatch, TokenStats, Verdicts

__all__ = [
    "EMBEDDING_NEEDS",
    "STD_EPSILON",
    "LossOptions",
    "Method",
    "MethodOptions",
    "Need",
    "OverlongOptions",
    "centred",
    "clipped_surrogate",
    "has_signal",
    "old_logprobs",
    "penalized_rewards",
    "rewards_in_range",
    "standardized",
]

Need = Literal["embeddings", "all_embeddings", "ref_logprobs", "old_logprobs", "second_moments", "head_gram"]
"""embeddings: of rewarded rollouts, where two or more are; all_embeddings: of every rollout; ref_logprobs: of the starting
policy; old_logprobs: a pass before the first update; second_moments: with it sum p^2 and sum p^2 log p; head_gram: with it
the squared gradient of the output layer (policy.head)."""

EMBEDDING_NEEDS: frozenset[Need] = frozenset({"embeddings", "all_embeddings"})
"""Either wants an encoder."""

NO_SIGNAL = 1e-6
"""Advantages are of order 1; below this a whole group moves nothing."""

STD_EPSILON = 1e-4
"""Added to the std of a group's rewards."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the METHODS table."""

    name: str
    arxiv: str
    """Identifier of the paper; "" for our own."""
    summary: str
    """One line for the table."""
    evidence: str
    """What of it is verified, and what is our reconstruction."""
    options: type[MethodOptions]
    credit: Callable[[CreditInputs, Any], Credit]
    """(one group, options) -> its credits, advantages and metrics."""
    needs: frozenset[Need] = frozenset()
    """What the step must compute for every run of the method; ``needs_for`` adds what the options ask for."""
    transform: Callable[[Group, Verdicts, Rollout | None, Any], tuple[Group, Verdicts]] | None = None
    """(judged group, a reference solution as a rollout, options) -> the group that is credited; before reward shaping."""
    shape_rewards: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
    """([G] float64 rewards, [G] int64 lengths, options) -> [G] float64 rewards that ``credit`` sees."""
    environment: Environment | None = None
    """The conversation that a rollout is; None: one answer."""
    steps: Split | None = None
    """Where the verifiable steps of an answer end; None: it is judged as a whole."""
    prepare: Prepare | None = None
    """Phase one: constants that couple a group or the batch (methods.phase). Needs old_logprobs."""
    policy_loss: Callable[[TokenStats, TokenBatch, Any], tuple[torch.Tensor, dict[str, torch.Tensor]]]
    """(forward pass, batch, options) -> ([T] loss before token weights, [T] detached metrics)."""
    unit: Literal["token", "sequence", "labels"] = "token"
    """What an advantage acts on: each token; a whole row, through one ratio; or nothing, as only labels are read."""
    one_update: bool = False
    """Whether what ``prepare`` computes is exact for the first optimizer update of a step only."""
    pays_length: bool = False
    """Whether the credit rewards length by itself."""
    reads_rewards: bool = True
    """False: the verifier's rewards are only measured."""

    def needs_for(self, options: MethodOptions) -> frozenset[Need]:
        """Everything the step must compute under these options."""
        needs = set(self.needs)
        loss, parts = options.loss, [TOKEN_CREDITS[part.name] for part in options.token_credit]
        if loss.kl_coef > 0:
            needs.add("ref_logprobs")
            if loss.kl_in == "reward" or not isinstance(loss.kl_controller, FixedKl):
                needs.add("old_logprobs")
        if parts or self.prepare is not None:
            needs.add("old_logprobs")
        if any(part.second_moments for part in parts):
            needs.add("second_moments")
        return frozenset(needs)

    def token_loss(
        self, stats: TokenStats, batch: TokenBatch, options: MethodOptions
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The policy loss plus what holds the policy: KL to the reference, entropy bonus, distance to the old policy.

        [T] loss, [T] detached metrics of the policy loss and ``ref_kl``. Without old log-probabilities the current ones
        stand in, detached: ratio 1, the gradient of REINFORCE.
        Errors: ValueError when a KL term is asked for and the batch has no reference log-probabilities.
        """
        loss = options.loss
        loss_T, metrics = self.policy_loss(stats, batch, options)
        if loss.kl_coef > 0:
            if batch.ref_logprobs_T is None:
                raise ValueError("loss.kl_coef is above 0 but there are no reference log-probabilities: set it to 0")
            ref_kl_T = KL_ESTIMATORS[loss.kl_estimator](stats.logprobs_T, batch.ref_logprobs_T)
            if loss.kl_in == "loss":
                loss_T = loss_T + batch.scalars.get("kl_coef", loss.kl_coef) * ref_kl_T
            metrics["ref_kl"] = ref_kl_T.detach()
        if loss.entropy_coef > 0:
            loss_T = loss_T - loss.entropy_coef * stats.entropy_T
        if batch.old_kl_coef_T is not None:
            loss_T = loss_T + batch.old_kl_coef_T * (stats.logprobs_T - old_logprobs(stats, batch)).abs()
        return loss_T, metrics


def old_logprobs(stats: TokenStats, batch: TokenBatch) -> torch.Tensor:
    """[T] log-probabilities under the policy the step began with; the current ones, detached, where no pass was made."""
    return stats.logprobs_T.detach() if batch.old_logprobs_T is None else batch.old_logprobs_T


def clipped_surrogate(
    stats: TokenStats, batch: TokenBatch, options: MethodOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate per token, with the metrics of ``ppo_clip``."""
    loss = options.loss
    return ppo_clip(
        stats.logprobs_T,
        old_logprobs(stats, batch),
        batch.advantages_T,
        loss.clip_low,
        loss.clip_high,
        loss.dual_clip,
    )


def overlong_penalty(lengths_G: torch.Tensor, options: OverlongOptions) -> torch.Tensor:
    """[G] float64 in [-penalty, 0]: 0 up to max_tokens - buffer, then linear, full from max_tokens on (2503.14476)."""
    excess_G = lengths_G.double() - (options.max_tokens - options.buffer)
    return -options.penalty * (excess_G / options.buffer).clamp(0, 1)


def penalized_rewards(rewards_G: torch.Tensor, lengths_G: torch.Tensor, options: MethodOptions) -> torch.Tensor:
    """[G] float64 reward + overlong penalty: within [-penalty, 1]; any scale serves methods that compare."""
    if options.overlong is None:
        return rewards_G
    return rewards_G + overlong_penalty(lengths_G, options.overlong)


def rewards_in_range(rewards_G: torch.Tensor, lengths_G: torch.Tensor, options: MethodOptions) -> torch.Tensor:
    """[G] float64 in [0, 1]: reward + overlong penalty, at least 0, where a reward is a size and cannot be negative."""
    return penalized_rewards(rewards_G, lengths_G, options).clamp(min=0)


def has_signal(advantages_G: torch.Tensor) -> bool:
    """Whether a group moves the policy at all: for centred advantages, whether they differ from each other.

    The question is asked of the final advantages, never of the rewards: an all-correct group still carries signal when
    credit tells its members apart.
    """
    return bool(advantages_G.abs().max() > NO_SIGNAL)


def centred(values_G: torch.Tensor) -> torch.Tensor:
    """[G] values minus their mean. Errors: ValueError for a group of one."""
    if len(values_G) < 2:
        raise ValueError("a group of one rollout has no baseline to compare with: set rollout.group_size to 2 or more")
    return values_G - values_G.mean()


def standardized(values_G: torch.Tensor) -> torch.Tensor:
    """[G] (value - mean) / (population std + 1e-4). Errors: ValueError for a group of one."""
    centred_G = centred(values_G)
    return centred_G / (centred_G.square().mean().sqrt() + STD_EPSILON)

"""What a method is: a frozen record of pure functions and the type of its options; the trainer knows nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatron_gcpo.config.records import Record
from megatron_gcpo.loss.kl import KL_ESTIMATORS
from megatron_gcpo.loss.reduce import Reduction
from megatron_gcpo.loss.surrogate import ppo_clip
from megatron_gcpo.types import Credit, CreditInputs, TokenBatch, TokenStats

Need = Literal["embeddings", "ref_logprobs", "old_logprobs"]

NO_SIGNAL = 1e-6
"""Advantages are of order 1; below this a whole group moves nothing."""


class LossOptions(Record):
    """PPO's clipped surrogate and how tokens add up."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Tokens with negative advantage lose at most dual_clip x |advantage|; None: unbounded, as in PPO."""
    reduce: Reduction = "token_mean"
    """What weighs the same: each token, each row, each token at a fixed length, or each group (loss.reduce)."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term to the reference policy; 0: no reference policy is held."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that term (loss.kl). k1 has no mean gradient and is refused as a loss."""

    @model_validator(mode="after")
    def _refuse_k1(self) -> LossOptions:
        if self.kl_coef > 0 and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator k1 has gradient 0 in the mean, so kl_coef would only add noise: use k2 or k3"
            )
        return self


class OverlongOptions(Record):
    """Soft penalty for answers that nearly run out of room (DAPO, arXiv 2503.14476)."""

    max_tokens: PositiveInt
    """Length at which the penalty is full, usually rollout.max_new_tokens."""
    buffer: PositiveInt
    """The penalty grows linearly over the last ``buffer`` tokens before max_tokens."""
    penalty: float = Field(default=0.5, gt=0)
    """Full penalty. The paper takes 1 off rewards of -1 and 1; on our scale of 0 and 1 that is 0.5."""

    @model_validator(mode="after")
    def _fits(self) -> OverlongOptions:
        if self.buffer > self.max_tokens:
            raise ValueError(
                f"overlong.buffer {self.buffer} is larger than overlong.max_tokens {self.max_tokens}: lower it"
            )
        return self


class MethodOptions(Record):
    """Options every method has. A method's record sets its own defaults."""

    loss: LossOptions = LossOptions()
    group_filter: bool = False
    """Drop groups whose final advantages carry no signal, so that they do not dilute the means of the loss."""
    refill: NonNegativeInt = 0
    """Dynamic sampling: most extra rounds of generation that replace dropped groups; 0: train on what is left."""
    overlong: OverlongOptions | None = None
    """Soft length penalty on the rewards; None: off."""

    @model_validator(mode="before")
    @classmethod
    def _complete_loss(cls, section: Any) -> Any:
        """A partial ``loss`` section keeps this method's defaults for the rest, not the base record's."""
        if isinstance(section, Mapping) and isinstance(section.get("loss"), Mapping):
            defaults = cls.model_fields["loss"].get_default()
            return {**section, "loss": {**defaults.model_dump(), **section["loss"]}}
        return section

    @model_validator(mode="after")
    def _refill_what_is_dropped(self) -> MethodOptions:
        if self.refill and not self.group_filter:
            raise ValueError("refill replaces groups that group_filter drops: set group_filter: true, or refill: 0")
        return self


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the METHODS table."""

    name: str
    arxiv: str
    summary: str
    """One line for the table."""
    options: type[MethodOptions]
    credit: Callable[[CreditInputs, Any], Credit]
    """(one group, options) -> its credits, advantages and metrics."""
    needs: frozenset[Need] = frozenset()
    """What the step must compute for every run of the method; ``needs_for`` adds what the options ask for."""
    shape_rewards: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
    """([G] float64 rewards, [G] int64 lengths, options) -> [G] float64 rewards that ``credit`` sees."""
    token_loss: Callable[[TokenStats, TokenBatch, Any], tuple[torch.Tensor, dict[str, torch.Tensor]]]
    """(forward pass, batch, options) -> ([T] loss before token weights, [T] detached metrics)."""

    def needs_for(self, options: MethodOptions) -> frozenset[Need]:
        """Everything the step must compute under these options."""
        extra: set[Need] = {"ref_logprobs"} if options.loss.kl_coef > 0 else set()
        return self.needs | extra


def clipped_token_loss(
    stats: TokenStats, batch: TokenBatch, options: MethodOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate plus kl_coef x KL estimate, per token; metrics of ``ppo_clip`` and ``ref_kl``.

    Without old log-probabilities the current ones stand in, detached: ratio 1, the gradient of REINFORCE.
    Errors: ValueError when a KL term is asked for and the batch has no reference log-probabilities.
    """
    loss = options.loss
    current_T = stats.logprobs_T
    old_T = current_T.detach() if batch.old_logprobs_T is None else batch.old_logprobs_T
    loss_T, metrics = ppo_clip(current_T, old_T, batch.advantages_T, loss.clip_low, loss.clip_high, loss.dual_clip)
    if loss.kl_coef > 0:
        if batch.ref_logprobs_T is None:
            raise ValueError("loss.kl_coef is above 0 but there are no reference log-probabilities: set it to 0")
        ref_kl_T = KL_ESTIMATORS[loss.kl_estimator](current_T, batch.ref_logprobs_T)
        loss_T = loss_T + loss.kl_coef * ref_kl_T
        metrics["ref_kl"] = ref_kl_T.detach()
    return loss_T, metrics


def overlong_penalty(lengths_G: torch.Tensor, options: OverlongOptions) -> torch.Tensor:
    """[G] float64 in [-penalty, 0]: 0 up to max_tokens - buffer, then linear, full from max_tokens on (2503.14476)."""
    excess_G = lengths_G.double() - (options.max_tokens - options.buffer)
    return -options.penalty * (excess_G / options.buffer).clamp(0, 1)


def penalized_rewards(rewards_G: torch.Tensor, lengths_G: torch.Tensor, options: MethodOptions) -> torch.Tensor:
    """[G] float64 reward + overlong penalty: within [-penalty, 1]; any scale serves methods that compare."""
    if options.overlong is None:
        return rewards_G
    return rewards_G + overlong_penalty(lengths_G, options.overlong)


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

"""The options that every method has. A method's own record adds to them and sets its own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatron_gcpo.config.records import Record
from megatron_gcpo.data.curriculum import SamplerOptions, UniformSampling
from megatron_gcpo.loss.reduce import Reduction
from megatron_gcpo.methods.kl import FixedKl, KlController
from megatron_gcpo.methods.token_credit.table import TokenCreditOptions


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
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: the estimator is differentiated; reward: it is taken off the advantages of the tokens up to it (methods.kl)."""
    kl_controller: KlController = FixedKl()
    """How kl_coef changes during the run: fixed, adaptive or expo (methods.kl)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus: the mean entropy of the tokens' distributions, nats, is taken off the loss."""

    @model_validator(mode="after")
    def _kl_makes_sense(self) -> LossOptions:
        if self.kl_coef > 0 and self.kl_estimator == "k1" and self.kl_in == "loss":
            raise ValueError(
                "kl_estimator k1 has gradient 0 in the mean, so kl_coef would only add noise: use k2 or k3, or kl_in: "
                "reward"
            )
        if self.kl_coef == 0 and not isinstance(self.kl_controller, FixedKl):
            raise ValueError(f"kl_controller {self.kl_controller.name} has nothing to steer: set kl_coef above 0")
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
    token_credit: tuple[TokenCreditOptions, ...] = ()
    """Parts that spread a rollout's advantage over its tokens, in order: cw, opefo, papo, clip_cov, kl_cov."""
    sampler: SamplerOptions = UniformSampling()
    """Which prompts a step takes: uniform, gaussian or variance (data.curriculum), or judged by the policy (data.judged)."""
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
    def _fits_together(self) -> MethodOptions:
        if self.refill and not self.group_filter:
            raise ValueError("refill replaces groups that group_filter drops: set group_filter: true, or refill: 0")
        names = [part.name for part in self.token_credit]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"token_credit names {twice[0]} twice: a part of the chain appears once")
        return self

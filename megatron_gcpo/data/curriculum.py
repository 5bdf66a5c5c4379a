"""Samplers that learn which prompts are worth a visit: the chance of a prompt follows the success seen on it so far.

Each prompt has an estimate p of its success rate, 0.5 until it is visited, then p <- decay p + (1 - decay) x mean reward of the
group. A step draws distinct prompts with weights w(p), without replacement (the exponential keys of Efraimidis and Spirakis,
2006: largest u^(1/w) first), and u depends on (seed, step, prompt) alone.

gaussian  w = exp(-(p - center)^2 / (2 sigma^2)), the Gaussian curriculum of FG-ExPO (arXiv 2605.11403, verified).
variance  w = floor + 4 p (1 - p): proportional to the variance of a 0/1 reward, which is what a group's advantages live on
          (derived); ``floor`` keeps prompts that look solved or hopeless coming back.

The fourth way, ``judged``, asks the policy (data.judged).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from megatron_gcpo.cluster.grid import check_shares
from megatron_gcpo.config.named import by_name
from megatron_gcpo.config.records import Record
from megatron_gcpo.data.judged import JudgedSampler, JudgedSampling
from megatron_gcpo.data.sampler import PromptSampler, share_of
from megatron_gcpo.seeds import derive_seed, uniforms

START = 0.5


class UniformSampling(Record):
    """Epoch by epoch, each a permutation (data.sampler)."""

    name: Literal["uniform"] = "uniform"


class GaussianSampling(Record):
    name: Literal["gaussian"] = "gaussian"
    center: float = Field(default=0.5, ge=0, le=1)
    """The success rate that is visited most."""
    sigma: float = Field(default=0.35, gt=0)
    decay: float = Field(default=0.9, ge=0, lt=1)
    """Weight of the old estimate when a group is seen."""

    def weights(self, rates_P: np.ndarray) -> np.ndarray:
        return np.exp(-((rates_P - self.center) ** 2) / (2 * self.sigma**2))


class VarianceSampling(Record):
    name: Literal["variance"] = "variance"
    floor: float = Field(default=0.1, gt=0)
    """Weight of a prompt that is always or never solved; 1 is that of one solved half of the time, less the floor."""
    decay: float = Field(default=0.9, ge=0, lt=1)
    """Weight of the old estimate when a group is seen."""

    def weights(self, rates_P: np.ndarray) -> np.ndarray:
        return self.floor + 4 * rates_P * (1 - rates_P)


SamplerOptions = Annotated[
    Annotated[UniformSampling | GaussianSampling | VarianceSampling | JudgedSampling, Field(discriminator="name")],
    BeforeValidator(by_name),
]


class CurriculumSampler:
    """Prompt indices by (step, round, replica), given what was seen so far; the same on every leader that saw the same."""

    def __init__(
        self,
        options: GaussianSampling | VarianceSampling,
        *,
        num_prompts: int,
        prompts_per_step: int,
        seed: int,
        num_replicas: int = 1,
    ) -> None:
        """Arguments and errors as of PromptSampler."""
        if prompts_per_step > num_prompts:
            raise ValueError(
                f"rollout.prompts_per_step {prompts_per_step} exceeds the {num_prompts} prompts of data.train: a step takes "
                f"each prompt at most once, use at most {num_prompts}"
            )
        check_shares("rollout.prompts_per_step", prompts_per_step, num_replicas)
        self.options = options
        self.num_prompts, self.prompts_per_step, self.seed = num_prompts, prompts_per_step, seed
        self.num_replicas = num_replicas
        self._rates: dict[int, float] = {}

    def share(self, step: int, replica: int, round: int = 0) -> tuple[int, ...]:
        """The part of ``select(step, round)`` that one replica works on."""
        return share_of(self.select(step, round), replica, self.num_replicas)

    def select(self, step: int, round: int = 0) -> tuple[int, ...]:
        """The distinct prompts of a step; round r takes the r-th chunk of one order, so that rounds never collide."""
        rates_P = np.full(self.num_prompts, START)
        for prompt, rate in self._rates.items():
            rates_P[prompt] = rate
        keys_P = -np.log1p(-uniforms(self.num_prompts, derive_seed(self.seed, "data.curriculum", step)))
        order = np.argsort(keys_P / self.options.weights(rates_P), kind="stable")
        chunk = order[round * self.prompts_per_step : (round + 1) * self.prompts_per_step]
        return tuple(chunk[: len(chunk) - len(chunk) % self.num_replicas].tolist())

    def tally(self, seen: Mapping[int, np.ndarray]) -> np.ndarray:
        """[2, P] float64 (sum of mean rewards, number of groups) by prompt; tallies of replicas add up.

        seen: prompt -> [G] rewards of its group.
        """
        tally_2P = np.zeros((2, self.num_prompts))
        for prompt, rewards_G in seen.items():
            tally_2P[:, prompt] += float(np.mean(rewards_G)), 1
        return tally_2P

    def update(self, tally_2P: np.ndarray) -> None:
        """Learn from a step, given the tally of all replicas."""
        for prompt in np.flatnonzero(tally_2P[1]).tolist():
            mean = float(np.clip(tally_2P[0, prompt] / tally_2P[1, prompt], 0, 1))
            old = self._rates.get(prompt, START)
            self._rates[prompt] = self.options.decay * old + (1 - self.options.decay) * mean

    def state(self) -> dict[str, Any]:
        """JSON-able: the estimates of the prompts visited so far."""
        return {"rates": {str(prompt): rate for prompt, rate in sorted(self._rates.items())}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state()``."""
        self._rates = {int(prompt): float(rate) for prompt, rate in state.get("rates", {}).items()}
        assert all(math.isfinite(rate) for rate in self._rates.values()), "got estimates that are not finite"


type Sampler = PromptSampler | CurriculumSampler | JudgedSampler
"""Prompt indices by (step, round, replica). All but the first learn from what a step saw: ``update(tally(seen))``."""


def make_sampler(
    options: UniformSampling | GaussianSampling | VarianceSampling | JudgedSampling,
    *,
    num_prompts: int,
    prompts_per_step: int,
    seed: int,
    num_replicas: int,
) -> Sampler:
    """The sampler that the options name. Errors: ValueError as of PromptSampler and JudgedSampler."""
    sizes = {
        "num_prompts": num_prompts,
        "prompts_per_step": prompts_per_step,
        "seed": seed,
        "num_replicas": num_replicas,
    }
    if isinstance(options, UniformSampling):
        return PromptSampler(**sizes)
    if isinstance(options, JudgedSampling):
        return JudgedSampler(options, **sizes)
    return CurriculumSampler(options, **sizes)

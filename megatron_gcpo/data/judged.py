"""A sampler that lets the policy say which prompts are worth a visit, and how it is paid for saying so (METIS, 2605.11235).

A prompt teaches as much as the rewards of its group vary: v = their population variance, in [0, 0.25], p (1 - p) for 0/1
rewards. Of the candidates of a step, a multiple of the prompts that it takes, the policy forecasts v, and the step takes
those with the largest forecasts. A forecast earns

    R = 1 - (4 (v_hat - v))^2      1 when exact, 0 at the largest error

once v is seen, and a fixed low reward when no number can be read from it; the prompt then counts as middling. REINFORCE
takes the mean reward of earlier steps, a moving average, as its baseline.

Everything here is arithmetic on numbers that all leaders share: they choose alike and remember alike, without a text between
them. Asking the policy is ``megatron_gcpo.judge``; the method of that name is methods/metis.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field, PositiveInt

from megatron_gcpo.cluster.grid import check_shares
from megatron_gcpo.config.records import Record
from megatron_gcpo.data.sampler import PromptSampler, share_of

MAX_VARIANCE = 0.25
"""Largest variance of rewards in [0, 1]: one half of them 0, the other 1."""
NEUTRAL = MAX_VARIANCE / 2
"""What a forecast that cannot be read counts as."""


class JudgedSampling(Record):
    """The policy forecasts how informative candidates are; the step takes the best of them."""

    name: Literal["judged"] = "judged"
    candidates: PositiveInt = 2
    """Candidates for each prompt that a step takes; the paper's multiple is not public."""
    recent: int = Field(default=3, ge=0)
    """How many of the last outcomes (a prompt and its variance) a forecast is shown. Without any, most cannot be read."""
    coef: float = Field(default=0.01, ge=0)
    """Weight of the forecasts' loss beside the policy's; 0: forecasts choose, and are not trained."""
    unreadable: float = Field(default=0.0, le=1)
    """Reward of a forecast in which no number from 0 to 0.25 is found."""
    decay: float = Field(default=0.9, ge=0, lt=1)
    """Weight of the old baseline when a step is seen."""
    max_new_tokens: PositiveInt = 256
    """Of a forecast, its short reasoning included."""


@dataclass(frozen=True, kw_only=True)
class Paid:
    """What the forecasts of a step were worth, by candidate."""

    rewards_C: np.ndarray
    """[C] float64; NaN where a readable forecast's prompt was not visited, so that nobody knows."""
    advantages_C: np.ndarray
    """[C] float64 reward - baseline; NaN as in rewards_C."""
    errors_C: np.ndarray
    """[C] float64 |v_hat - v|, NaN unless the forecast was read and its prompt visited."""


class JudgedSampler:
    """Prompt indices by (step, round, replica), given the forecasts of the step; the same on every leader."""

    def __init__(
        self, options: JudgedSampling, *, num_prompts: int, prompts_per_step: int, seed: int, num_replicas: int = 1
    ) -> None:
        """Arguments as of PromptSampler. Raises ValueError when there are fewer prompts than candidates."""
        count = options.candidates * prompts_per_step
        if count > num_prompts:
            raise ValueError(
                f"method.sampler judged chooses among {count} candidates a step ({options.candidates} x "
                f"rollout.prompts_per_step {prompts_per_step}), but data.train has {num_prompts} prompts: lower "
                f"method.sampler.candidates to {num_prompts // prompts_per_step or 1}, or rollout.prompts_per_step"
            )
        check_shares("rollout.prompts_per_step", prompts_per_step, num_replicas)
        self.options = options
        self.num_prompts, self.prompts_per_step, self.num_replicas = num_prompts, prompts_per_step, num_replicas
        self._source = PromptSampler(
            num_prompts=num_prompts, prompts_per_step=count, seed=seed, num_replicas=num_replicas
        )
        self._step = -1
        self.forecasts_2C = np.zeros((2, 0))
        """Of the step's candidates: v_hat, NEUTRAL where it could not be read; 1 where it could, else 0."""
        self.recent: tuple[tuple[int, float], ...] = ()
        """(prompt, variance) of the last outcomes, the oldest first."""
        self._baseline: float | None = None

    def candidates(self, step: int) -> tuple[int, ...]:
        """The distinct prompts to forecast, epoch by epoch like those of PromptSampler."""
        return self._source.select(step)

    def choose(self, step: int, forecasts_2C: np.ndarray) -> None:
        """Take note of the forecasts of all replicas, in the order of ``candidates``.

        forecasts_2C: [2, C] float64: v_hat, and 1 where it was read, else 0.
        """
        count = len(self.candidates(step))
        assert forecasts_2C.shape == (2, count), f"got forecasts {forecasts_2C.shape}, expected {(2, count)}"
        predicted_C = np.where(forecasts_2C[1] > 0, forecasts_2C[0], NEUTRAL)
        self._step, self.forecasts_2C = step, np.stack([predicted_C, forecasts_2C[1]])

    def select(self, step: int, round: int = 0) -> tuple[int, ...]:
        """The prompts of a step: the chunk of rank ``round`` by forecast, the largest first, in the candidates' order.

        Of equal forecasts the earlier candidate comes first. Within a chunk the order says nothing of the forecasts, so
        that the last outcomes, which the next forecasts are shown, are no biased sample.
        """
        assert step == self._step, f"got step {step}, expected {self._step}, whose candidates were judged"
        ranked = np.argsort(-self.forecasts_2C[0], kind="stable")
        chunk = np.sort(ranked[round * self.prompts_per_step : (round + 1) * self.prompts_per_step])
        candidates = self.candidates(step)
        return tuple(candidates[place] for place in chunk)

    def share(self, step: int, replica: int, round: int = 0) -> tuple[int, ...]:
        """The part of ``select(step, round)`` that one replica works on."""
        return share_of(self.select(step, round), replica, self.num_replicas)

    def share_of_candidates(self, step: int, replica: int) -> tuple[int, ...]:
        """The candidates that one replica's engine is asked about."""
        return share_of(self.candidates(step), replica, self.num_replicas)

    def tally(self, seen: Mapping[int, np.ndarray]) -> np.ndarray:
        """[2, P] float64 (variance of the group's rewards, 1 where it was visited); tallies of replicas add up."""
        tally_2P = np.zeros((2, self.num_prompts))
        for prompt, rewards_G in seen.items():
            tally_2P[:, prompt] = np.var(np.asarray(rewards_G, dtype=np.float64)), 1
        return tally_2P

    def update(self, tally_2P: np.ndarray) -> Paid:
        """Pay the step's forecasts and remember its outcomes, given the tally of all replicas."""
        candidates = np.array(self.candidates(self._step))
        variances_C, visited_C = tally_2P[:, candidates]
        predicted_C, read_C = self.forecasts_2C
        gaps_C = predicted_C - variances_C
        judged_C = (read_C > 0) & (visited_C > 0)
        rewards_C = np.where(judged_C, 1 - (4 * gaps_C) ** 2, np.where(read_C > 0, np.nan, self.options.unreadable))
        known_C = ~np.isnan(rewards_C)
        mean = float(rewards_C[known_C].mean()) if known_C.any() else None
        # the first step has no earlier ones: its own mean stands in
        baseline = mean if self._baseline is None else self._baseline
        advantages_C = rewards_C - (np.nan if baseline is None else baseline)
        if baseline is not None and mean is not None:
            self._baseline = self.options.decay * baseline + (1 - self.options.decay) * mean
        rounds = -(-len(candidates) // self.prompts_per_step)
        order = [prompt for round in range(rounds) for prompt in self.select(self._step, round)]
        outcomes = [(prompt, float(tally_2P[0, prompt])) for prompt in order if tally_2P[1, prompt]]
        kept = self.options.recent
        self.recent = (*self.recent, *outcomes)[-kept:] if kept else ()
        return Paid(rewards_C=rewards_C, advantages_C=advantages_C, errors_C=np.where(judged_C, np.abs(gaps_C), np.nan))

    def state(self) -> dict[str, Any]:
        """JSON-able: the last outcomes and the baseline."""
        return {"recent": [list(pair) for pair in self.recent], "baseline": self._baseline}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state()``."""
        self.recent = tuple((int(prompt), float(variance)) for prompt, variance in state.get("recent", ()))
        self._baseline = state.get("baseline")
        assert self._baseline is None or math.isfinite(self._baseline), "got a baseline that is not finite"

"""Which prompts a step takes: a pure function of (seed, step), so a resumed run repeats nothing and skips nothing.

Lay the epochs end to end, each a seeded permutation of all prompts; step s owns positions [s * P, (s + 1) * P) of that
line and nothing else. No cursor is stored: the step number is the cursor. The number of replicas only cuts a step's
positions into shares, so a run may resume on another layout.

A step that straddles two epochs would meet some prompts twice, and two groups of one prompt in one step would be
sampled from the same random streams. The head of each epoch therefore puts off the prompts that the straddling step
already holds: every epoch stays a permutation, every step has distinct prompts.

Dynamic sampling asks for more prompts when groups turn out to carry no signal. Round r >= 1 of step s takes chunk r of
a permutation that belongs to the step alone, without the prompts of round 0: rounds never collide within the step, and
how many rounds a step needed does not shift the steps after it. The price: those extra prompts are also visited by the
epochs, so a prompt may be seen more often than its epoch count says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_gcpo.cluster.grid import check_shares
from megatron_gcpo.seeds import derive_seed, permutation, unit


@dataclass(frozen=True, kw_only=True)
class PromptSampler:
    """Prompt indices by (step, round, replica)."""

    num_prompts: int
    """Size of the prompt set."""
    prompts_per_step: int
    """P, over all replicas."""
    seed: int
    """``run.seed``."""
    num_replicas: int = 1

    def __post_init__(self) -> None:
        if self.prompts_per_step > self.num_prompts:
            raise ValueError(
                f"rollout.prompts_per_step {self.prompts_per_step} exceeds the {self.num_prompts} prompts of "
                f"data.train: a step takes each prompt at most once, use at most {self.num_prompts}"
            )
        check_shares("rollout.prompts_per_step", self.prompts_per_step, self.num_replicas)

    def epoch(self, step: int) -> float:
        """Epochs completed when ``step`` begins."""
        return step * self.prompts_per_step / self.num_prompts

    def select(self, step: int, round: int = 0) -> tuple[int, ...]:
        """The distinct prompt indices of a step, over all replicas.

        Round 0 has ``prompts_per_step``. Later rounds (refills) have as many while there are prompts left that the step
        has not taken, then fewer (a multiple of the replicas), then none.
        """
        assert min(step, round) >= 0, f"got step {step}, round {round}, expected both >= 0"
        size, per_step = self.num_prompts, self.prompts_per_step
        first = step * per_step
        epoch, offset = divmod(first, size)
        taken = _epoch_order(self.seed, size, per_step, epoch)[offset : offset + per_step]
        if len(taken) < per_step:
            following = _epoch_order(self.seed, size, per_step, epoch + 1)
            taken = np.concatenate([taken, following[: per_step - len(taken)]])
        if round == 0:
            return tuple(taken.tolist())
        order = permutation(size, derive_seed(self.seed, "data.refill", step))
        fresh = order[~np.isin(order, taken)]
        chunk = fresh[(round - 1) * per_step : round * per_step]
        return tuple(chunk[: len(chunk) - len(chunk) % self.num_replicas].tolist())

    def share(self, step: int, replica: int, round: int = 0) -> tuple[int, ...]:
        """The part of ``select(step, round)`` that one replica works on: every num_replicas-th, from its own number."""
        return share_of(self.select(step, round), replica, self.num_replicas)


@dataclass(frozen=True, kw_only=True)
class RowSampler:
    """(prompt index, demonstration index) pairs by step, for supervised training.

    Prompts come epoch by epoch like those of PromptSampler (a step may be larger than the prompt set, then it meets
    prompts again); each visit draws one of the prompt's demonstrations with probability proportional to its weight.
    """

    weights_P: Sequence[Sequence[float]]
    """Demonstration weights of each prompt (``PromptSet.demonstration_weights_P``)."""
    rows_per_step: int
    """Over all replicas."""
    seed: int
    """``run.seed``."""
    num_replicas: int = 1

    def __post_init__(self) -> None:
        check_shares("train.sft_rows_per_step", self.rows_per_step, self.num_replicas)
        if not self.weights_P:
            raise ValueError("stage sft has no prompts: correct data.train")
        for index, weights in enumerate(self.weights_P):
            if not weights:
                raise ValueError(
                    f"prompt {index} of data.train has no demonstration for stage sft: set "
                    "data.train.demonstration_column, or use a task"
                )
            if not (all(math.isfinite(w) and w >= 0 for w in weights) and sum(weights) > 0):
                raise ValueError(
                    f"the demonstrations of prompt {index} of data.train have the weights {list(weights)}: they must "
                    "be finite, >= 0 and not all 0; correct data.train.options.weights"
                )

    def select(self, step: int) -> tuple[tuple[int, int], ...]:
        """The rows of a step, over all replicas."""
        assert step >= 0, f"got step {step}, expected >= 0"
        return tuple(self._row(p) for p in range(step * self.rows_per_step, (step + 1) * self.rows_per_step))

    def share(self, step: int, replica: int) -> tuple[tuple[int, int], ...]:
        """The part of ``select(step)`` that one replica trains on."""
        return share_of(self.select(step), replica, self.num_replicas)

    def _row(self, position: int) -> tuple[int, int]:
        epoch, offset = divmod(position, len(self.weights_P))
        prompt = int(_plain_order(self.seed, len(self.weights_P), epoch)[offset])
        cumulative = np.cumsum(self.weights_P[prompt])
        draw = unit(derive_seed(self.seed, "data.demonstration", position)) * cumulative[-1]
        # side="right" skips weights of 0, whose interval is empty
        return prompt, int(np.searchsorted(cumulative, draw, side="right"))


def share_of[Row](rows: tuple[Row, ...], replica: int, num_replicas: int) -> tuple[Row, ...]:
    """The part of a step's rows that one replica works on: every num_replicas-th, from its own number."""
    assert 0 <= replica < num_replicas, f"got replica {replica}, expected 0 to {num_replicas - 1}"
    return rows[replica::num_replicas]


@lru_cache(maxsize=4)
def _plain_order(seed: int, size: int, epoch: int) -> np.ndarray:
    return permutation(size, derive_seed(seed, "data.epoch", epoch))


@lru_cache(maxsize=4)
def _epoch_order(seed: int, size: int, per_step: int, epoch: int) -> np.ndarray:
    """The permutation of an epoch whose head holds no prompt of the step that straddles its beginning.

    An epoch depends on the one before it only through that step. Every ``per_step / gcd(size, per_step)`` epochs no
    step straddles, so the chain that has to be followed is short and does not grow with the run.
    """
    period = per_step // math.gcd(size, per_step)
    order = _plain_order(seed, size, epoch - epoch % period)
    for current in range(epoch - epoch % period + 1, epoch + 1):
        begun = current * size % per_step
        taken = order[size - begun :]
        plain = _plain_order(seed, size, current)
        free = plain[~np.isin(plain, taken)]
        head = free[: per_step - begun]
        order = np.concatenate([head, plain[~np.isin(plain, head)]])
    return order

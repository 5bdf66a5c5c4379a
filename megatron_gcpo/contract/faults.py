"""Engines with one planted fault each: what the contract test must find, and name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron_gcpo.contract.diagnosis import Cause, Evidence, Factor, diagnose, keeps
from megatron_gcpo.contract.measure import measure
from megatron_gcpo.reshard.check import NO_LIMIT
from megatron_gcpo.rollout.engine import Sample, SampleRequest, Sampling
from megatron_gcpo.rollout.transformers_engine import TransformersEngine
from megatron_gcpo.run import Run

Scored = Sequence[tuple[Sequence[int], Sequence[int]]]


class WrongTemperature(TransformersEngine):
    """Draws and scores at a temperature of its own."""

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        return super().generate(requests, replace(sampling, temperature=1.3 * sampling.temperature))

    def score(self, sequences: Scored, temperature: float = 1.0) -> list[np.ndarray]:
        return super().score(sequences, 1.3 * temperature)


class ScoresAtTemperatureOne(TransformersEngine):
    """Draws at the temperature, and reports log-probs before it was applied."""

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        samples = super().generate(requests, sampling)
        raw = super().score([(r.prompt_token_ids, s.token_ids) for r, s in zip(requests, samples, strict=True)], 1.0)  # type: ignore[misc]
        return [replace(s, logprobs=logprobs) for s, logprobs in zip(samples, raw, strict=True)]


class CutsTheTail(TransformersEngine):
    """Draws from the likeliest tokens only, which nobody asked for."""

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        return super().generate(requests, replace(sampling, top_p=0.8))


class ShiftedPositions(TransformersEngine):
    """Gives the first completion token the position after its own, and so on."""

    def _forward(self, ids_RT: torch.Tensor, positions_RT: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        decoding = ids_RT.shape[1] == 1
        return super()._forward(ids_RT, positions_RT + 1 if decoding else positions_RT, *args, **kwargs)


class ShiftedLogprobs(TransformersEngine):
    """Reports with each token the log-prob of the next one."""

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        return [replace(s, logprobs=np.roll(s.logprobs, -1)) for s in super().generate(requests, sampling)]


class AddsAToken(TransformersEngine):
    """Puts the end-of-sequence token before every prompt, as some tokenizers and servers do."""

    first: tuple[int, ...] = ()

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        self.first = sampling.stop_token_ids[:1]
        longer = [replace(r, prompt_token_ids=(*self.first, *r.prompt_token_ids)) for r in requests]
        return super().generate(longer, sampling)

    def score(self, sequences: Scored, temperature: float = 1.0) -> list[np.ndarray]:
        return super().score([((*self.first, *prompt), completion) for prompt, completion in sequences], temperature)


class IgnoresStops(TransformersEngine):
    """Goes on after stop tokens."""

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        return super().generate(requests, replace(sampling, stop_token_ids=()))


class CorruptsATensor(TransformersEngine):
    """Holds one tensor that is not what was pushed."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int | None = None) -> None:
        super().load_weights(weights, version=version)
        held = self.weight(self.corrupted)
        held.copy_(held.flip(-1))

    @property
    def corrupted(self) -> str:
        """The query projection of the middle layer."""
        names = sorted(name for name in self._slots if name.endswith("q_proj.weight"))
        return names[len(names) // 2]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is planted, and what must be named."""

    engine: type[TransformersEngine]
    factor: Factor
    dtype: torch.dtype | None = None
    """Of the engine; None: as configured."""
    many_stops: bool = False
    """Let every fourth id end a completion, so that a short probe meets one."""


NO_FAULT = "none"
FAULTS: dict[str, Fault] = {
    NO_FAULT: Fault(engine=TransformersEngine, factor="model"),
    "wrong temperature": Fault(engine=WrongTemperature, factor="temperature"),
    "temperature not applied": Fault(engine=ScoresAtTemperatureOne, factor="temperature"),
    "cut distribution": Fault(engine=CutsTheTail, factor="sampling mask"),
    "shifted position ids": Fault(engine=ShiftedPositions, factor="position ids"),
    "shifted log-probs": Fault(engine=ShiftedLogprobs, factor="position ids"),
    "a token before prompts": Fault(engine=AddsAToken, factor="tokenizer"),
    "stop ids ignored": Fault(engine=IgnoresStops, factor="tokenizer", many_stops=True),
    "other precision": Fault(engine=TransformersEngine, factor="precision", dtype=torch.bfloat16),
    "a corrupted tensor": Fault(engine=CorruptsATensor, factor="weights"),
}
"""Name -> fault; NO_FAULT must be found sound."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the contract test said of one planted fault."""

    fault: str
    evidence: Evidence
    causes: tuple[Cause, ...]
    """Empty when the two sides were found to agree."""

    @property
    def right(self) -> bool:
        """Whether the fault was found and named, and nothing else where there is none."""
        if self.fault == NO_FAULT:
            return not self.causes
        return bool(self.causes) and self.causes[0].factor == FAULTS[self.fault].factor


def find_planted(run: Run, fault: str) -> Finding:
    """Give the leaders an embedded engine with this fault in place of their own, push, compare. Collective."""
    planted = _with(run, FAULTS[fault])
    planted.push(planted.starting_probe(), version=0, limit=NO_LIMIT)
    evidence = measure(planted)
    return Finding(fault=fault, evidence=evidence, causes=() if keeps(evidence) else diagnose(evidence))


def _with(run: Run, fault: Fault) -> Run:
    if run.actor.policy.dtype != torch.float32:
        raise ValueError(
            "faults are planted in fp32, where the smallest shows: set model.dtype: fp32 and rollout.dtype: fp32"
        )
    changes = {
        "max_logprob_gap": run.gap_limit.max,  # as without the fault
        "dtype": "fp32" if fault.dtype is None else "bf16",
        "temperature": 0.8,  # at 1 it would make no difference whether it is applied
    }
    config = run.config.model_copy(update={"rollout": run.config.rollout.model_copy(update=changes)})
    leader = run.leader
    if leader is not None:
        policy = run.actor.policy
        stops = range(0, policy.vocab_size, 4) if fault.many_stops else ()
        leader = replace(
            leader,
            engine=fault.engine(
                policy.hf_config,
                device=policy.device,
                dtype=fault.dtype or torch.float32,
                max_batch_rows=config.rollout.max_batch_rows,
            ),
            sampling=replace(
                leader.sampling, temperature=0.8, stop_token_ids=(*leader.sampling.stop_token_ids, *stops)
            ),
        )
    return replace(run, config=config, leader=leader)

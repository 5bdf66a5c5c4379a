"""From measurements of trainer and engine to the causes of their disagreement, the likeliest first. Pure.

Each measurement repeats the comparison with one thing switched. A factor explains the share of the average gap that its
switch takes away; what rests on other evidence than a smaller gap says so. All rules here are derived.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_gcpo.reshard.check import GapLimit, LogprobGap
from megatron_gcpo.rollout.engine import Sampling

Factor = Literal["temperature", "sampling mask", "tokenizer", "position ids", "precision", "weights", "model"]
PATTERN_WEIGHT = 0.9
"""What a pattern of signs counts against numbers that fit: several causes may draw it."""
FOUND = 0.5
"""The share of the gap that a factor must explain to be named the cause."""


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """The two comparisons that the contract consists of; both with the trainer's log-probs."""

    drawn: LogprobGap
    """Of what the engine reported with the tokens it drew, under its sampling distribution."""
    scored: LogprobGap
    """Of what the engine says when it is asked to score the same tokens, over the whole vocabulary."""

    def failing(self, limit: GapLimit) -> tuple[str, ...]:
        """Which of the two are over the limit."""
        return tuple(name for name in ("drawn", "scored") if not limit.allows(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class Switch:
    """The comparison once more, with one thing switched."""

    factor: Factor
    setting: str
    """What was switched, e.g. "trainer at temperature 0.7"."""
    gaps: Gaps


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A tensor that the engine does not hold as the trainer exports it."""

    name: str
    relative: float
    """Norm of the difference over the norm of the trainer's tensor."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that was measured on one probe."""

    limit: GapLimit
    """What is allowed (rollout.max_logprob_gap)."""
    sampling: Sampling
    """What the engine was asked for."""
    trainer_dtype: torch.dtype
    engine_dtype: torch.dtype
    quantized: bool
    """Whether the engine computes with quantised weights."""
    base: Gaps
    """As configured."""
    switches: tuple[Switch, ...] = ()
    one_sided: float = 0.0
    """1 when no drawn token's log-prob is below the scored one, 0 when signs are even: what a cut distribution looks like."""
    rounding: LogprobGap | None = None
    """Between the trainer in its own precision and in the other one (fp32 and bf16); None: not measured."""
    facts: tuple[str, ...] = ()
    """What the drawn tokens themselves show to be wrong (facts.py)."""
    tensors: tuple[TensorDifference, ...] | None = None
    """Tensors of the engine that differ from the trainer's; None: this engine does not show its tensors."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One explanation."""

    factor: Factor
    explains: float
    """Share of the gap, 0 to 1."""
    finding: str
    """The numbers behind it."""
    remedy: str
    """What to do about it."""


def keeps(evidence: Evidence) -> bool:
    """Whether trainer and engine keep the contract."""
    return not evidence.base.failing(evidence.limit) and not evidence.facts


def diagnose(evidence: Evidence) -> tuple[Cause, ...]:
    """The causes that explain anything, the likeliest first; at least one. For evidence that does not keep the contract."""
    causes = [*_tokenizer(evidence), *_weights(evidence), *_temperature(evidence), *_mask(evidence)]
    causes += [*_positions(evidence), *_precision(evidence)]
    causes = [cause for cause in causes if cause.explains >= 0.01]
    if all(cause.explains < FOUND for cause in causes):
        causes.append(_model(evidence))
    return tuple(sorted(causes, key=lambda cause: -cause.explains))


def explained(base: Gaps, switched: Gaps, limit: GapLimit) -> float:
    """Share of the average gap, of the comparisons over the limit, that a switch takes away; of two, the smaller."""
    shares = []
    for name in base.failing(limit):
        before, after = getattr(base, name), getattr(switched, name)
        # a switch that leaves few tokens to compare explains nothing about the others
        comparable = 0 < before.mean < math.inf and 2 * after.num_tokens > before.num_tokens
        shares.append(max(0.0, 1 - after.mean / before.mean) if comparable else 0.0)
    return min(shares, default=0.0)


def _best(evidence: Evidence, factor: Factor) -> tuple[float, Switch | None]:
    found = [(explained(evidence.base, s.gaps, evidence.limit), s) for s in evidence.switches if s.factor == factor]
    return max(found, key=lambda pair: pair[0], default=(0.0, None))


def _temperature(evidence: Evidence) -> Iterator[Cause]:
    share, switch = _best(evidence, "temperature")
    if switch is not None:
        yield Cause(
            factor="temperature",
            explains=share,
            finding=f"the engine's numbers fit {switch.setting}, and rollout.temperature is "
            f"{evidence.sampling.temperature:g}; {_left(evidence, switch.gaps)}",
            remedy="make the engine apply rollout.temperature, once, to the log-probs it reports (vLLM: "
            "logprobs_mode processed_logprobs)",
        )


def _mask(evidence: Evidence) -> Iterator[Cause]:
    base, sampling = evidence.base, evidence.sampling
    if "drawn" not in base.failing(evidence.limit) or not base.drawn.mean < math.inf:
        return
    left = max(0.0, 1 - base.scored.mean / base.drawn.mean)
    cuts = [
        text
        for text, in_force in (
            (f"rollout.top_p {sampling.top_p:g}", sampling.top_p < 1),
            (f"rollout.top_k {sampling.top_k}", sampling.top_k > 0),
            (f"rollout.min_p {sampling.min_p:g}", sampling.min_p > 0),
        )
        if in_force
    ]
    source = " and ".join(cuts) or "no cut that rollout asks for (a generation_config.json of the checkpoint, perhaps)"
    yield Cause(
        factor="sampling mask",
        explains=left * evidence.one_sided * (1.0 if cuts else PATTERN_WEIGHT),
        finding=f"the drawn tokens' log-probs are of a renormalised distribution, by {source}: over the whole vocabulary "
        f"the engine says the same as the trainer, up to {base.scored.max:.2g}",
        remedy="the trainer evaluates the whole vocabulary: set rollout.top_p: 1, rollout.top_k: 0 and rollout.min_p: 0, "
        "or raise rollout.max_logprob_gap to train on the difference",
    )


def _tokenizer(evidence: Evidence) -> Iterator[Cause]:
    remedy = (
        "give trainer and engine the same tokenizer, special ids and stop ids (model.tokenizer, rollout.stop_token_ids)"
    )
    if evidence.facts:
        yield Cause(factor="tokenizer", explains=1.0, finding="; ".join(evidence.facts), remedy=remedy)
    share, switch = _best(evidence, "tokenizer")
    if switch is not None:
        finding = f"the engine's numbers fit {switch.setting}; {_left(evidence, switch.gaps)}"
        yield Cause(factor="tokenizer", explains=share, finding=finding, remedy=remedy)


def _positions(evidence: Evidence) -> Iterator[Cause]:
    share, switch = _best(evidence, "position ids")
    if switch is not None:
        yield Cause(
            factor="position ids",
            explains=share,
            finding=f"the numbers agree for {switch.setting}; {_left(evidence, switch.gaps)}",
            remedy="one side counts positions, or the tokens its log-probs belong to, differently: check left padding and "
            "cached prefixes in the engine, train.packing in the trainer",
        )


def _precision(evidence: Evidence) -> Iterator[Cause]:
    share, _ = _best(evidence, "precision")
    names = [str(d).removeprefix("torch.") for d in (evidence.trainer_dtype, evidence.engine_dtype)]
    finding = f"the trainer computes in {names[0]}, the engine in {names[1]}"
    if evidence.quantized:
        finding += " with quantised weights"
    if evidence.rounding is not None:
        finding += (
            f"; rounding alone moves the trainer's own log-probs by {evidence.rounding.max:.2g} at most, "
            f"{evidence.rounding.mean:.2g} on average"
        )
        # where both round differently, no switch brings equal numbers: gaps of the size of rounding are explained by it
        gaps = [getattr(evidence.base, name).mean for name in evidence.base.failing(evidence.limit)]
        if gaps and max(gaps) > 0 and torch.bfloat16 in (evidence.trainer_dtype, evidence.engine_dtype):
            share = max(share, min(1.0, evidence.rounding.mean / max(gaps)))
    yield Cause(
        factor="precision",
        explains=share,
        finding=finding,
        remedy="set rollout.dtype and model.dtype alike, or rollout.max_logprob_gap above what rounding does",
    )


def _weights(evidence: Evidence) -> Iterator[Cause]:
    if evidence.tensors:
        worst = sorted(evidence.tensors, key=lambda t: -t.relative)
        named = ", ".join(f"{t.name} (off by {t.relative:.2g} of its norm)" for t in worst[:3])
        more = f" and {len(worst) - 3} more" if len(worst) > 3 else ""
        yield Cause(
            factor="weights",
            explains=1.0,
            finding=f"the engine does not hold what the trainer exports: {named}{more}",
            remedy="push again; if it stays, the engine's loading of these tensors is at fault",
        )


def _model(evidence: Evidence) -> Cause:
    held = {
        True: "the engine holds the trainer's tensors",
        False: "whether the engine holds the trainer's tensors cannot be seen from outside",
    }[evidence.tensors is not None]
    return Cause(
        factor="model" if evidence.tensors is not None else "weights",
        explains=FOUND,
        finding=f"{held}, and no other factor makes the numbers agree",
        remedy="compare the model's mathematics on both sides: rotary base and scaling, norm epsilon, tied embeddings, "
        "options under model.megatron, and the name mapping of this model family",
    )


def _left(evidence: Evidence, gaps: Gaps) -> str:
    names = evidence.base.failing(evidence.limit)
    before = max((getattr(evidence.base, name).max for name in names), default=0.0)
    after = max((getattr(gaps, name).max for name in names), default=0.0)
    return f"then the largest gap falls from {before:.2g} to {after:.2g}"


def one_sidedness(drawn_T: torch.Tensor, scored_T: torch.Tensor) -> float:
    """Evidence.one_sided of the same tokens' log-probs, [T] each: renormalising what is left of a cut only raises them."""
    difference_T = drawn_T.double() - scored_T.double()
    total = float(difference_T.abs().sum())
    return max(0.0, 1 - 2 * float(difference_T.clamp(max=0).abs().sum()) / total) if total > 0 else 0.0

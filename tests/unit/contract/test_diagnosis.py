"""From made-up measurements to named causes: a toy policy of known logits stands for both sides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megatron_gcpo.contract.diagnosis import (
    Evidence,
    Gaps,
    Switch,
    TensorDifference,
    diagnose,
    explained,
    keeps,
    one_sidedness,
)
from megatron_gcpo.reshard.check import GapLimit, LogprobGap, logprob_gap
from megatron_gcpo.rollout.engine import Sampling
from megatron_gcpo.rollout.sampling import sampling_logprobs

LIMIT = GapLimit(max=1e-4, mean=1e-4)
TOKENS, VOCABULARY = 64, 40


@dataclass(frozen=True)
class Side:
    """What one side says of the same drawn tokens."""

    drawn: torch.Tensor
    scored: torch.Tensor


def logits() -> torch.Tensor:
    return 3 * torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0))


def said(logits_TV: torch.Tensor, sampling: Sampling, tokens_T: torch.Tensor) -> torch.Tensor:
    return sampling_logprobs(logits_TV, sampling).gather(1, tokens_T[:, None])[:, 0]


def drawn_under(sampling: Sampling) -> torch.Tensor:
    probs_TV = sampling_logprobs(logits(), sampling).exp()
    return torch.multinomial(probs_TV, 1, generator=torch.Generator().manual_seed(1))[:, 0]


def gaps(trainer_T: torch.Tensor, engine: Side) -> Gaps:
    return Gaps(drawn=logprob_gap(trainer_T, engine.drawn), scored=logprob_gap(trainer_T, engine.scored))


def evidence(engine: Side, tokens_T: torch.Tensor, sampling: Sampling, **more: Any) -> Evidence:
    """As measured: base gaps, and the trainer at the temperature that fits best."""

    def trainer(temperature: float) -> torch.Tensor:
        return said(logits(), Sampling(temperature=temperature), tokens_T)

    base = gaps(trainer(sampling.temperature), engine)
    failing = base.failing(LIMIT) or ("drawn", "scored")
    tried = [0.3 + 0.01 * i for i in range(200)]
    fitted = min(tried, key=lambda t: max(getattr(gaps(trainer(t), engine), name).mean for name in failing))
    switch = Switch(factor="temperature", setting=f"temperature {fitted:.3g}", gaps=gaps(trainer(fitted), engine))
    return Evidence(
        limit=LIMIT,
        sampling=sampling,
        trainer_dtype=torch.float32,
        engine_dtype=torch.float32,
        quantized=False,
        base=base,
        one_sided=one_sidedness(engine.drawn, engine.scored),
        **{"switches": (switch,), **more},
    )


def engine_with(drawn: Sampling, scored: Sampling) -> tuple[Side, torch.Tensor]:
    tokens_T = drawn_under(drawn)
    return Side(said(logits(), drawn, tokens_T), said(logits(), scored, tokens_T)), tokens_T


def test_equal_sides_keep_the_contract() -> None:
    engine, tokens_T = engine_with(Sampling(temperature=0.8), Sampling(temperature=0.8))
    assert keeps(evidence(engine, tokens_T, Sampling(temperature=0.8)))
    assert not keeps(evidence(engine, tokens_T, Sampling(temperature=0.8), facts=("ends on no stop id",)))


@pytest.mark.parametrize("wrong", [0.5, 0.7, 1.0, 1.3])
@pytest.mark.parametrize("scores_right", [True, False])
def test_a_temperature_is_found_by_its_fit(wrong: float, scores_right: bool) -> None:
    asked = Sampling(temperature=0.8)
    engine, tokens_T = engine_with(Sampling(temperature=wrong), asked if scores_right else Sampling(temperature=wrong))
    first = diagnose(evidence(engine, tokens_T, asked))[0]
    assert first.factor == "temperature"
    assert first.explains > 0.97
    assert f"temperature {wrong:.3g}" in first.finding
    assert "rollout.temperature is 0.8" in first.finding


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"top_k": 4}, {"min_p": 0.2}])
@pytest.mark.parametrize("asked_for", [True, False])
def test_a_cut_is_found_by_its_sign(cut: dict[str, float], asked_for: bool) -> None:
    """Renormalising what is left raises every drawn token's log-prob, by another amount at every position."""
    whole, cut_down = Sampling(temperature=0.9), Sampling(temperature=0.9, **cut)  # type: ignore[arg-type]
    engine, tokens_T = engine_with(cut_down, whole)
    first, *_ = diagnose(evidence(engine, tokens_T, cut_down if asked_for else whole))
    assert first.factor == "sampling mask"
    assert first.explains > 0.85
    name = next(iter(cut))
    assert (f"rollout.{name}" in first.finding) is asked_for
    assert f"rollout.{name}" in first.remedy


def test_one_sidedness_of_known_signs() -> None:
    zeros_T = torch.zeros(4)
    assert one_sidedness(torch.tensor([1.0, 2, 0, 0]), zeros_T) == 1
    assert one_sidedness(torch.tensor([1.0, -1, 2, -2]), zeros_T) == 0
    assert one_sidedness(torch.tensor([3.0, -1, 0, 0]), zeros_T) == pytest.approx(0.5)
    assert one_sidedness(zeros_T, zeros_T) == 0


def test_a_differing_tensor_is_the_cause_whatever_else_fits_a_little() -> None:
    engine, tokens_T = engine_with(Sampling(), Sampling())
    engine = Side(engine.drawn + 0.3, engine.scored - 0.2)
    tensors = tuple(TensorDifference(name=f"layer{i}.weight", relative=0.1 * i) for i in range(1, 6))
    first = diagnose(evidence(engine, tokens_T, Sampling(), tensors=tensors))[0]
    assert (first.factor, first.explains) == ("weights", 1.0)
    assert "layer5.weight (off by 0.5 of its norm), layer4.weight" in first.finding
    assert "and 2 more" in first.finding
    assert "layer1.weight" not in first.finding


@pytest.mark.parametrize(
    ("tensors", "factor", "says"), [((), "model", "holds the trainer's tensors"), (None, "weights", "cannot be seen")]
)
def test_what_nothing_explains_is_said_to_be_unexplained(tensors: Any, factor: str, says: str) -> None:
    engine, tokens_T = engine_with(Sampling(), Sampling())
    noise_T = torch.randn(TOKENS, generator=torch.Generator().manual_seed(2))
    first = diagnose(
        evidence(Side(engine.drawn + noise_T, engine.scored + noise_T), tokens_T, Sampling(), tensors=tensors)
    )[0]
    assert first.factor == factor
    assert says in first.finding
    assert "rotary" in first.remedy


def test_gaps_of_the_size_of_rounding_are_rounding() -> None:
    """Two sides in bf16 never agree exactly; a gap far above what rounding does is something else."""
    engine, tokens_T = engine_with(Sampling(), Sampling())
    noise_T = 0.02 * torch.randn(TOKENS, generator=torch.Generator().manual_seed(2))
    rounding = LogprobGap(max=0.05, mean=0.016, num_tokens=TOKENS)
    found = replace(
        evidence(Side(engine.drawn + noise_T, engine.scored + noise_T), tokens_T, Sampling(), tensors=()),
        trainer_dtype=torch.bfloat16,
        engine_dtype=torch.bfloat16,
        rounding=rounding,
    )
    first = diagnose(found)[0]
    assert first.factor == "precision"
    assert "0.05 at most" in first.finding
    far = replace(found, rounding=replace(rounding, mean=1e-4))
    assert diagnose(far)[0].factor == "model"
    # the same numbers between two sides in fp32 are no rounding
    assert diagnose(replace(found, trainer_dtype=torch.float32, engine_dtype=torch.float32))[0].factor == "model"


@pytest.mark.parametrize("factor", ["tokenizer", "position ids", "precision"])
def test_a_switch_that_makes_the_numbers_agree_names_its_factor(factor: Any) -> None:
    gap, none = LogprobGap(max=2.0, mean=0.5, num_tokens=9), LogprobGap(max=1e-5, mean=1e-6, num_tokens=9)
    half = LogprobGap(max=1.0, mean=0.25, num_tokens=9)
    base, engine = Gaps(drawn=gap, scored=gap), engine_with(Sampling(), Sampling())
    healed = Switch(factor=factor, setting="something switched", gaps=Gaps(drawn=none, scored=none))
    halved = Switch(factor="temperature", setting="temperature 2", gaps=Gaps(drawn=half, scored=none))
    found = replace(evidence(*engine, Sampling()), base=base, switches=(halved, healed))
    first, second = diagnose(found)
    assert (first.factor, second.factor) == (factor, "temperature")
    assert first.explains == pytest.approx(1, abs=1e-5)
    assert second.explains == pytest.approx(0.5)  # the worse of the two comparisons counts


def test_only_comparisons_over_the_limit_must_be_explained() -> None:
    gap, none = LogprobGap(max=2.0, mean=0.5, num_tokens=9), LogprobGap(max=0.0, mean=0.0, num_tokens=9)
    base = Gaps(drawn=gap, scored=none)
    assert explained(base, Gaps(drawn=none, scored=gap), LIMIT) == 1
    assert explained(base, Gaps(drawn=gap, scored=none), LIMIT) == 0
    assert explained(Gaps(drawn=none, scored=none), base, LIMIT) == 0


def test_a_switch_that_leaves_few_tokens_to_compare_explains_nothing() -> None:
    gap, few = LogprobGap(max=2.0, mean=0.5, num_tokens=9), LogprobGap(max=0.0, mean=0.0, num_tokens=4)
    assert explained(Gaps(drawn=gap, scored=gap), Gaps(drawn=few, scored=few), LIMIT) == 0


def test_numbers_that_are_none_never_pass() -> None:
    engine, tokens_T = engine_with(Sampling(), Sampling())
    broken = Side(engine.drawn.index_fill(0, torch.tensor([3]), torch.nan), engine.scored)
    found = evidence(broken, tokens_T, Sampling(), switches=())
    assert not keeps(found)
    assert diagnose(found)

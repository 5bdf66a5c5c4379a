import math

import pytest
import torch

from megatron_gcpo.reshard.check import GapLimit, LogprobGap, default_gap_limit, logprob_gap, require_small_gap


class Engine:
    policy_version = 5
    reason = None

    def refuse(self, reason):
        self.reason = reason


def test_gap_counts_masked_tokens_only():
    trainer = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]])
    engine = torch.tensor([[-1.0, -2.5, -3.25], [-4.0, -9.0, math.nan]])
    gap = logprob_gap(trainer, engine, torch.tensor([[1, 1, 1], [1, 0, 0]]))
    assert gap == LogprobGap(max=0.5, mean=0.75 / 4, num_tokens=4)


def test_differences_are_taken_in_float64():
    """In float32 the difference of -100 and -100.00001 is off by a third."""
    gap = logprob_gap(torch.tensor([-100.0]), torch.tensor([-100.00001], dtype=torch.float64))
    assert gap.max == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_never_pass(bad):
    engine = Engine()
    gap = logprob_gap(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, bad]))
    with pytest.raises(ValueError, match="refuses to serve"):
        require_small_gap(gap, GapLimit(max=1e9, mean=1e9), engine)
    assert engine.reason is not None


def test_both_sides_infinite_is_not_agreement():
    assert logprob_gap(torch.tensor([-math.inf]), torch.tensor([-math.inf])).max == math.inf


def test_a_gap_within_the_limit_passes_and_one_above_stops_the_engine():
    gap, engine = LogprobGap(max=1e-4, mean=1e-5, num_tokens=9), Engine()
    require_small_gap(gap, GapLimit(max=1e-4, mean=1e-4), engine)
    assert engine.reason is None
    with pytest.raises(ValueError, match=r"version 5.*9 tokens.*0\.0001 at most.*max_logprob_gap.*Likely causes"):
        require_small_gap(gap, GapLimit(max=0.99e-4, mean=1e-4), engine)
    assert "differ from the trainer's by up to 0.0001" in engine.reason


def test_a_check_on_no_tokens_is_no_check():
    gap = logprob_gap(torch.zeros(3), torch.ones(3), torch.zeros(3))
    assert gap == LogprobGap(max=0.0, mean=0.0, num_tokens=0)
    with pytest.raises(ValueError, match="no tokens"):
        require_small_gap(gap, GapLimit(max=1.0, mean=1.0), Engine())


def test_the_average_is_limited_too():
    gap, engine = LogprobGap(max=1.0, mean=0.2, num_tokens=9), Engine()
    require_small_gap(gap, GapLimit(max=1.0, mean=0.2), engine)
    with pytest.raises(ValueError, match=r"0\.2 on average, limit 1 at most and 0\.1 on average"):
        require_small_gap(gap, GapLimit(max=1.0, mean=0.1), engine)
    assert engine.reason is not None


def test_default_limits():
    """One token may be far off below fp32, the average may not."""
    bf16, fp8 = default_gap_limit(torch.bfloat16), default_gap_limit(torch.bfloat16, "fp8")
    assert default_gap_limit(torch.float32) == GapLimit(max=1e-4, mean=1e-4)
    rounding = LogprobGap(max=0.73, mean=0.055, num_tokens=16)
    wrong = LogprobGap(max=0.8, mean=0.2, num_tokens=100)
    assert bf16.allows(rounding)
    assert not bf16.allows(wrong)
    assert fp8.allows(wrong)
    assert not fp8.allows(LogprobGap(max=math.inf, mean=math.inf, num_tokens=1))

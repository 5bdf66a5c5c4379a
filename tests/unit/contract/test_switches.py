"""The search for the temperature that fits."""

from __future__ import annotations

import pytest
import torch

from megatron_gcpo.contract.switches import fit_temperature


@pytest.mark.parametrize("true", [0.31, 0.62, 0.7, 1.0, 1.4, 2.6])
def test_the_temperature_is_recovered_from_log_probs(true: float) -> None:
    logits_TV = 2 * torch.randn(50, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens_T1 = torch.multinomial((logits_TV / true).softmax(-1), 1, generator=torch.Generator().manual_seed(1))

    def said(temperature: float) -> torch.Tensor:
        return (logits_TV / temperature).log_softmax(-1).gather(1, tokens_T1)

    fitted = fit_temperature(lambda t: float((said(t) - said(true)).abs().mean()), configured=0.7)
    assert fitted == pytest.approx(true, rel=0.01)


def test_a_temperature_that_is_not_applied_is_found_exactly() -> None:
    assert fit_temperature(lambda t: abs(t - 1.0), configured=0.6) == 1.0
    assert fit_temperature(lambda t: abs(t - 0.36), configured=0.6) == pytest.approx(0.36, rel=1e-12)  # applied twice

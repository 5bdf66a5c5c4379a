"""Rotary angles of packed rows, against fp64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_gcpo.policy.rotary import make_rotary_exact


def rotary(interpolation: float | None = None) -> Any:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
    return SimpleNamespace(
        inv_freq=frequencies, seq_len_interpolation_factor=interpolation, get_freqs_non_repeated=None
    )


def policy_with(embedding: Any) -> Any:
    return SimpleNamespace(chunks=[SimpleNamespace(module=SimpleNamespace(rotary_pos_emb=embedding))])


@pytest.mark.parametrize("interpolation", [None, 4.0])
def test_angles_are_exact_at_any_position(interpolation: float | None) -> None:
    """fp32 products are off by position x 6e-8 radians; reduced in fp64 first, every position is as good as the first."""
    embedding = rotary(interpolation)
    make_rotary_exact(policy_with(embedding))
    position_S = torch.arange(8192, dtype=torch.float64) / (interpolation or 1.0)
    expected_SF = torch.outer(position_S, embedding.inv_freq.double())
    got_SF = embedding.get_freqs_non_repeated(8192)
    assert got_SF.dtype == torch.float32
    assert (got_SF.double().cos() - expected_SF.cos()).abs().max() < 5e-7
    assert (got_SF.double().sin() - expected_SF.sin()).abs().max() < 5e-7
    plain_SF = torch.outer(position_S.float(), embedding.inv_freq)
    assert (plain_SF.double().cos() - expected_SF.cos()).abs().max() > 1e-5


def test_an_offset_continues_the_row() -> None:
    embedding = rotary()
    make_rotary_exact(policy_with(embedding))
    whole_SF = embedding.get_freqs_non_repeated(100)
    torch.testing.assert_close(embedding.get_freqs_non_repeated(40, offset=60), whole_SF[60:], rtol=0, atol=0)


def test_models_without_rotary_embeddings_are_left_alone() -> None:
    make_rotary_exact(policy_with(None))
    make_rotary_exact(SimpleNamespace(chunks=[SimpleNamespace(module=SimpleNamespace())]))  # pyright: ignore

import math

import pytest
import torch

from megatron_gcpo.evaluate import effective_number, effective_rank, vendi_score


def unit_rows(num, dim, seed=0):
    rows = torch.randn(num, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(rows, dim=-1)


def test_effective_number_is_a_hill_number():
    assert effective_number("aabbcc") == pytest.approx(3)
    assert effective_number("aaaa") == pytest.approx(1)
    assert effective_number([]) == 0.0
    shares = [0.5, 0.25, 0.25]
    assert effective_number(["a", "a", None, "b"]) == pytest.approx(math.prod(p**-p for p in shares))


@pytest.mark.parametrize("score", [vendi_score, effective_rank])
def test_copies_count_once_and_orthogonal_rows_each(score):
    assert score(torch.eye(5)[:3]) == pytest.approx(3)
    assert score(torch.eye(5)[[1, 1, 1, 1]]) == pytest.approx(1)
    assert score(torch.zeros(0, 5)) == 0.0
    assert score(unit_rows(1, 5)) == pytest.approx(1)


def test_vendi_score_from_the_eigenvalues_of_the_kernel():
    rows_KD = unit_rows(6, 4)
    eigenvalues = torch.linalg.eigvalsh(rows_KD @ rows_KD.T / 6).clamp(min=1e-300)
    expected = float((-(eigenvalues * eigenvalues.log()).sum()).exp())
    assert vendi_score(rows_KD) == pytest.approx(expected, rel=1e-9)
    # repeating every row changes no share of the spectrum
    assert vendi_score(torch.cat([rows_KD, rows_KD])) == pytest.approx(expected, rel=1e-9)


def test_two_rows_at_an_angle():
    """Unit rows at cosine c: the kernel's eigenvalues are (1 + c) / 2 and (1 - c) / 2; singular values their roots."""
    c = 0.6
    rows_KD = torch.tensor([[1.0, 0.0], [c, math.sqrt(1 - c * c)]], dtype=torch.float64)
    assert vendi_score(rows_KD) == pytest.approx(0.8**-0.8 * 0.2**-0.2)
    big = math.sqrt(0.8) / (math.sqrt(0.8) + math.sqrt(0.2))
    assert effective_rank(rows_KD) == pytest.approx(big**-big * (1 - big) ** -(1 - big))

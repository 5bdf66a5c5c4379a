from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.evaluate import distinct_at_k, pass_at_k


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_hit(case):
    n, correct, k = case
    subsets = list(combinations([1] * correct + [0] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_of_many_samples_neither_overflows_nor_rounds():
    n, correct, k = 5000, 40, 300
    exact = 1 - Fraction(comb(n - correct, k), comb(n, k))
    assert pass_at_k(n, correct, k) == pytest.approx(float(exact), rel=1e-12)


def test_extremes():
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(8, 1, 8) == 1.0
    assert pass_at_k(8, 3, 1) == pytest.approx(3 / 8)


@given(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=7), st.data())
def test_distinct_at_k_is_the_mean_over_k_subsets(labels, data):
    k = data.draw(st.integers(1, len(labels)))
    sizes = [len(set(subset) - {None}) for subset in combinations(labels, k)]
    assert distinct_at_k(labels, k) == pytest.approx(sum(sizes) / len(sizes), abs=1e-12)


def test_distinct_at_n_counts_the_labels():
    assert distinct_at_k(["a", None, "b", "a"], 4) == 2.0
    assert distinct_at_k([None, None], 2) == 0.0


@pytest.mark.parametrize("k", [0, 5])
def test_k_outside_the_samples_says_what_to_change(k):
    with pytest.raises(ValueError, match=f"k = {k} does not fit 4 samples.*evaluate.samples.*evaluate.ks"):
        pass_at_k(4, 2, k)
    with pytest.raises(ValueError, match=r"evaluate\.ks"):
        distinct_at_k([None] * 4, k)

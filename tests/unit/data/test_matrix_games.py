"""Zero-sum games: equilibria against brute force, the residual's laws, parsing, and disjoint sizes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gcpo.data.tasks import TASKS, make_task
from megatron_gcpo.data.tasks.games import equilibrium, exploitability, rounded, value
from megatron_gcpo.data.tasks.matrix_games import matrix_of, padded, read_strategies

ROCK = ((0, -1, 1), (1, 0, -1), (-1, 1, 0))


@st.composite
def games(draw, most=5):
    rows, columns = draw(st.integers(1, most)), draw(st.integers(1, most))
    payoff = st.integers(-9, 9)
    return draw(st.lists(st.lists(payoff, min_size=columns, max_size=columns), min_size=rows, max_size=rows))


def shares(draw_from: list[int]) -> list[float]:
    total = sum(draw_from)
    return [n / total for n in draw_from]


@settings(max_examples=60, deadline=None)
@given(games())
def test_equilibria_are_exact(matrix):
    x, y = equilibrium(matrix)
    assert sum(x) == sum(y) == 1
    assert min(*x, *y, Fraction(0)) >= 0
    assert exploitability(matrix, x, y) == 0


def test_the_value_is_that_of_no_regret_play():
    """Row and column learn by multiplicative weights; their averages approach the value from both sides."""
    rng = np.random.default_rng(0)
    for size in (2, 5, 12):
        a = rng.integers(-9, 10, (size, size))
        x, y = np.ones(size) / size, np.ones(size) / size
        mean_x, mean_y, steps = np.zeros(size), np.zeros(size), 6000
        for _ in range(steps):
            mean_x, mean_y = mean_x + x / steps, mean_y + y / steps
            gain, loss = a @ y, x @ a
            x, y = x * np.exp(0.01 * gain), y * np.exp(-0.01 * loss)
            x, y = x / x.sum(), y / y.sum()
        assert (mean_x @ a).min() - 1e-9 <= float(value(a.tolist())) <= (a @ mean_y).max() + 1e-9
        assert (a @ mean_y).max() - (mean_x @ a).min() < 0.6


@settings(max_examples=60, deadline=None)
@given(games(4), st.data())
def test_laws_of_the_residual(matrix, data):
    """Not negative; the same after adding a constant; scales with the game; 2-Lipschitz in the payoffs."""
    counts = st.integers(1, 9)
    x = shares(data.draw(st.lists(counts, min_size=len(matrix), max_size=len(matrix))))
    y = shares(data.draw(st.lists(counts, min_size=len(matrix[0]), max_size=len(matrix[0]))))
    e = exploitability(matrix, x, y)
    assert e >= -1e-12
    assert e <= max(map(max, matrix)) - min(map(min, matrix)) + 1e-9
    assert exploitability([[a + 7 for a in row] for row in matrix], x, y) == pytest.approx(e, abs=1e-9)
    assert exploitability([[3 * a for a in row] for row in matrix], x, y) == pytest.approx(3 * e, abs=1e-9)
    moved = [[a + data.draw(st.integers(-2, 2)) for a in row] for row in matrix]
    change = max(abs(a - b) for r, s in zip(matrix, moved, strict=True) for a, b in zip(r, s, strict=True))
    assert abs(exploitability(moved, x, y) - e) <= 2 * change + 1e-9


def test_rock_paper_scissors():
    third = [Fraction(1, 3)] * 3
    assert exploitability(ROCK, third, third) == 0
    assert exploitability(ROCK, [1, 0, 0], third) == 1
    verify = TASKS["matrix_games"].verify
    answer = "0 -1 1;1 0 -1;-1 1 0"
    assert verify(answer, "so\nx = [1/3, 1/3, 1/3], y = [1/3, 1/3, 1/3]") == pytest.approx(1)
    assert verify(answer, "x = [1, 0, 0], y = [1, 0, 0]") == 0
    assert verify(answer, "x = [1, 0, 0], y = [1/3, 1/3, 1/3]") == pytest.approx(0.5)


@given(games(4), st.integers(0, 3), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_dominated_actions_change_neither_value_nor_the_best_play(matrix, extra, seed):
    problem = (len(matrix), len(matrix[0]), *(a for row in matrix for a in row))
    larger = matrix_of(padded(problem, extra, 9, "dominated", seed))
    assert (len(larger), len(larger[0])) == (len(matrix) + extra, len(matrix[0]) + extra)
    assert value(larger) == value(matrix)


def test_random_actions_may_change_the_value():
    task = make_task("matrix_games", {"heldout_sizes": "2x2", "padding": 2, "padding_kind": "random"})
    plain = make_task("matrix_games", {"sizes": "3x3", "heldout_sizes": "2x2"})
    values = [[value(matrix_of(problem)) for problem in t.split("heldout")[:10]] for t in (plain, task)]
    assert values[0] != values[1]


@pytest.mark.parametrize("style", ["words", "natural"])
@pytest.mark.parametrize("sizes", ["2x2,3x3", "1x2", "12x12"])
def test_demonstrations_are_nearly_unexploitable(style, sizes):
    """Two decimals cost at most a percent per action of the spread."""
    task = make_task("matrix_games", {"style": style, "heldout_sizes": sizes, "sizes": "4x4"})
    for problem in task.split("heldout")[:: 1 if sizes != "12x12" else 16]:
        (demonstration,) = task.demonstrations(problem)
        paid = task.verify(task.answer(problem), demonstration.text)
        assert 1 >= paid >= 1 - 0.01 * max(problem[:2])
        assert task.strategy(demonstration.text) == demonstration.strategy
        if style == "words":
            assert {*task.prompt_text(problem).split(), *demonstration.text.split()} <= set(task.vocabulary)


def test_rounding_keeps_the_sum():
    assert rounded([Fraction(1, 3)] * 3) == (Fraction(34, 100), Fraction(33, 100), Fraction(33, 100))
    assert sum(rounded([Fraction(1, 7)] * 7)) == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = [0.5, 0.5], y = [1]", ([0.5, 0.5], [1])),
        ("thinking x y\nX: (1/4, 3/4); Y: (.5,.5).", ([0.25, 0.75], [0.5, 0.5])),
        ("x 0 . 2 5 , 0 . 7 5 ; y 1 . 0 0 , 0 . 0 0", ([0.25, 0.75], [1, 0])),
        ("x = [0.33, 0.33, 0.33], y = [1]", ([1 / 3] * 3, [1])),
        ("x = [0.5, 0.4], y = [1]", None),
        ("x = [1.5, -0.5], y = [1]", None),
        ("x = [1/0], y = [1]", None),
        ("y = [1], x = [1]", None),
        ("x = [1]", None),
        ("x = [], y = []", None),
        ("", None),
    ],
)
def test_reading(text, found):
    read = read_strategies(text)
    assert read == found if found is None else (read[0], read[1]) == (pytest.approx(found[0]), pytest.approx(found[1]))


@settings(deadline=None)
@given(st.text(max_size=80) | st.from_regex(r"x( |=|\[|[0-9.,/]){0,20}y( |=|\[|[0-9.,/]){0,20}"))
def test_verifying_is_total(text):
    task = TASKS["matrix_games"]
    assert 0 <= task.verify("3 -1;0 2", text) <= 1
    assert task.strategy(text) in ("pure", "mixed", "none")


def test_hostile_lengths_cost_nothing():
    for junk in ("x" * 10**6, "x y " * 300_000, "x 1," * 300_000 + "y 1", "x" + "1" * 10**6 + "y"):
        assert TASKS["matrix_games"].verify("3 -1;0 2", junk) == 0


def test_splits():
    task = make_task("matrix_games", {"sft": 100})
    parts = {split: task.split(split) for split in ("sft", "train", "heldout")}
    assert [len(parts[s]) for s in parts] == [100, 412, 64]
    everyone = sum(parts.values(), ())
    assert len({task.problem_id(p) for p in everyone}) == len(everyone)
    assert sorted(everyone) == sorted(task.problems())
    sizes = {split: {p[:2] for p in problems} for split, problems in parts.items()}
    assert sizes["sft"] == sizes["train"] == {(2, 2), (3, 3)}
    assert sizes["heldout"] == {(5, 5), (6, 6), (7, 7)}
    assert make_task("matrix_games", {"sft": 0}).split("sft") == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": "2x2", "heldout_sizes": "2x2"}, "2x2 are both trained and held out"),
        ({"sizes": "4x4", "heldout_sizes": "2x2", "padding": 2}, "4x4 are both trained and held out"),
        ({"sizes": "2 by 2"}, "write rows x columns"),
        ({"padding": -1}, "need padding >= 0"),
        ({"padding_kind": "odd"}, "use dominated or random"),
        ({"sft": 9999}, "above count 512"),
        ({"sizes": "1x2", "highest": 1}, "there are not 512 different games of 1x2"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_task("matrix_games", options).split("train")


def test_unknown_splits_are_refused():
    with pytest.raises(ValueError, match="no split 'test'"):
        make_task("matrix_games").split("test")

"""Zero-sum matrix games: exact equilibria, and how far strategies are from one. Row player receives A[i][j], column pays."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

type Matrix = Sequence[Sequence[int]]
type Mixed = Sequence[Fraction | float]


def exploitability(matrix: Matrix, x: Mixed, y: Mixed) -> float:
    """max_i (A y)_i - min_j (x^T A)_j: what both could gain by deviating, together (arXiv 2605.10410).

    x, y: probabilities of rows and columns. Never negative (up to rounding for floats), 0 exactly at an equilibrium.
    """
    best_row = max(sum(a * q for a, q in zip(row, y, strict=True)) for row in matrix)
    best_column = min(sum(a * p for a, p in zip(column, x, strict=True)) for column in zip(*matrix, strict=True))
    return float(best_row - best_column)


def equilibrium(matrix: Matrix) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
    """Exact optimal strategies (rows, columns), by the simplex method on fractions with Bland's rule.

    With all payoffs shifted above 0, maximizing sum z subject to A z <= 1, z >= 0 gives y = z v and, from the dual
    variables, x = u v, where 1 / v is the optimum.
    """
    rows, columns = len(matrix), len(matrix[0])
    shift = 1 - min(map(min, matrix))
    table = [
        [Fraction(a + shift) for a in row] + [Fraction(int(i == k)) for k in range(rows)] + [Fraction(1)]
        for i, row in enumerate(matrix)
    ]
    costs = [Fraction(-1)] * columns + [Fraction(0)] * (rows + 1)
    basis = list(range(columns, columns + rows))
    while min(costs[:-1]) < 0:
        enter = next(k for k, cost in enumerate(costs) if cost < 0)
        leave = min(
            (i for i in range(rows) if table[i][enter] > 0),
            key=lambda i: (table[i][-1] / table[i][enter], basis[i]),
        )
        table[leave] = [value / table[leave][enter] for value in table[leave]]
        for line in (*table[:leave], *table[leave + 1 :], costs):
            factor = line[enter]
            line[:] = [value - factor * own for value, own in zip(line, table[leave], strict=True)]
        basis[leave] = enter
    total = costs[-1]
    z = {place: table[i][-1] for i, place in enumerate(basis)}
    y = tuple(z.get(j, Fraction(0)) / total for j in range(columns))
    x = tuple(costs[columns + i] / total for i in range(rows))
    return x, y


def value(matrix: Matrix) -> Fraction:
    """What the row player gets when both play optimally."""
    x, _ = equilibrium(matrix)
    return min(
        sum((a * p for a, p in zip(column, x, strict=True)), Fraction(0)) for column in zip(*matrix, strict=True)
    )


def rounded(shares: Sequence[Fraction], digits: int = 2) -> tuple[Fraction, ...]:
    """The nearest decimals that still sum to 1: the largest remainders are rounded up."""
    unit = 10**digits
    floors = [share * unit // 1 for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (floors[i] - shares[i] * unit, i))
    for i in order[: unit - sum(floors)]:
        floors[i] += 1
    return tuple(Fraction(int(f), unit) for f in floors)

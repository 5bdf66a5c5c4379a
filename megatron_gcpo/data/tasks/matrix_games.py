"""Zero-sum matrix games: find a Nash equilibrium; the reward is how little it can be exploited (arXiv 2605.10410).

An answer is two mixed strategies, and its exploitability e = max_i (A y)_i - min_j (x^T A)_j needs no reference: it is 0
exactly at an equilibrium and at most max A - min A, so 1 - e / (max A - min A) is a reward in [0, 1]. An answer that is no
pair of distributions earns 0 (rewards lie in [0, 1] here; a penalty of -1 would be the same up to scale in a group of
parsable answers). Verified: the residual. Ours: the map to a reward, and two decimals in demonstrations.

Held-out games have sizes that no training game has. ``padding`` adds actions to held-out games, of which a dominated one
keeps the value of the game and a random one need not.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import ClassVar, Literal

from megatron_gcpo.data.tasks.base import Problem, Task, join_digits, words
from megatron_gcpo.data.tasks.games import Matrix, equilibrium, exploitability, rounded
from megatron_gcpo.seeds import derive_seed, permutation, uniforms

SUM_TOLERANCE = 0.02
"""Decimals of a distribution may miss 1 by this much; they are divided by their sum."""


@dataclass(frozen=True, kw_only=True)
class MatrixGames(Task):
    """A problem is (rows, columns, payoffs row by row...); payoffs are whole numbers."""

    sizes: str = "2x2,3x3"
    """Rows x columns of training games; all equally often."""
    heldout_sizes: str = "5x5,6x6,7x7"
    """Of held-out games, before padding."""
    count: int = 512
    """Problems of splits "sft" and "train" together."""
    highest: int = 9
    """Payoffs are drawn from -highest to highest."""
    padding: int = 0
    """Rows and as many columns added to each held-out game."""
    padding_kind: Literal["dominated", "random"] = "dominated"
    """dominated: each added action is worse than some other one by 1 to 3 everywhere; random: as the others."""

    name: ClassVar[str] = "matrix_games"
    graded: ClassVar[bool] = True
    vocabulary: ClassVar[tuple[str, ...]] = words(", . - ; ? game rows x y")

    def __post_init__(self) -> None:
        super().__post_init__()
        trained, heldout = set(_sizes(self.sizes)), set(_sizes(self.heldout_sizes))
        heldout = {(rows + self.padding, columns + self.padding) for rows, columns in heldout}
        if self.padding < 0 or not 1 <= self.highest <= 99 or self.count < 2:
            raise ValueError(
                f"task matrix_games: padding {self.padding}, highest {self.highest}, count {self.count}: need padding >= 0, "
                "1 <= highest <= 99 and count >= 2"
            )
        if self.padding_kind not in ("dominated", "random"):
            raise ValueError(f"task matrix_games: padding_kind {self.padding_kind!r}: use dominated or random")
        if both := sorted(trained & heldout):
            rows, columns = both[0]
            raise ValueError(
                f"task matrix_games: games of {rows}x{columns} are both trained and held out: change sizes, heldout_sizes "
                "or padding"
            )

    @property
    def strategies(self) -> tuple[str, ...]:
        return ("pure", "mixed")

    def problems(self) -> tuple[Problem, ...]:
        return (*self._heldout(), *self._trained())

    def split(self, split: str) -> tuple[Problem, ...]:
        if split == "heldout":
            return self._heldout()
        games = self._trained()
        sft = len(games) // 2 if self.sft is None else self.sft
        if sft > len(games):
            raise ValueError(f"task matrix_games: sft {sft} is above count {self.count}: lower it")
        parts = {"sft": games[:sft], "train": games[sft:]}
        return parts[split] if split in parts else super().split(split)

    def problem_id(self, problem: Problem) -> str:
        rows, columns, *payoffs = problem
        digest = hashlib.blake2s(",".join(map(str, payoffs)).encode(), digest_size=6).hexdigest()
        return f"matrix_games-{rows}x{columns}-{digest}"

    def answer(self, problem: Problem) -> str:
        return ";".join(" ".join(map(str, row)) for row in matrix_of(problem))

    @staticmethod
    def verify(answer: str, text: str) -> float:
        matrix = [[int(a) for a in row.split()] for row in answer.split(";")]
        found = read_strategies(text)
        if found is None:
            return 0.0
        x, y = found
        if (len(x), len(y)) != (len(matrix), len(matrix[0])):
            return 0.0
        spread = max(map(max, matrix)) - min(map(min, matrix))
        return min(max(1 - exploitability(matrix, x, y) / spread, 0.0), 1.0)

    @staticmethod
    def strategy(text: str) -> str:
        found = read_strategies(text)
        if found is None:
            return "none"
        return "pure" if all(max(shares) == 1 for shares in found) else "mixed"

    def words_prompt(self, problem: Problem) -> str:
        rows = [" , ".join(" ".join(str(a)) for a in row) for row in matrix_of(problem)]
        return f"game rows {' ; '.join(rows)} ?"

    def natural_prompt(self, problem: Problem) -> str:
        rows = "\n".join(f"[{', '.join(map(str, row))}]" for row in matrix_of(problem))
        return (
            f"In a zero-sum game the first player chooses a row and the second a column of this matrix, and the second "
            f"pays the first the number that stands there:\n{rows}\nFind mixed strategies that form a Nash equilibrium. End "
            "with one line that gives the probabilities of the rows, x, and of the columns, y, for example: "
            "x = [0.5, 0.5], y = [0.25, 0.75]"
        )

    def solutions(self, problem: Problem) -> tuple[tuple[str, str], ...]:
        x, y = (rounded(shares) for shares in equilibrium(matrix_of(problem)))
        kind = "pure" if max(x) == max(y) == 1 else "mixed"
        return ((kind, f"x {_spelled(x)} ; y {_spelled(y)}"),)

    def _trained(self) -> tuple[Problem, ...]:
        games = _draw(self.sizes, self.count, self.highest, self.split_seed, "train")
        return tuple(games[i] for i in permutation(len(games), self.split_seed))

    def _heldout(self) -> tuple[Problem, ...]:
        games = _draw(self.heldout_sizes, self.heldout, self.highest, self.split_seed, "heldout")
        return tuple(
            padded(
                game, self.padding, self.highest, self.padding_kind, derive_seed(self.split_seed, "games.padding", i)
            )
            for i, game in enumerate(games)
        )


def matrix_of(problem: Problem) -> Matrix:
    rows, columns, *payoffs = problem
    return [payoffs[i * columns : (i + 1) * columns] for i in range(rows)]


def padded(problem: Problem, extra: int, highest: int, kind: str, seed: int) -> Problem:
    """The game with ``extra`` more rows and columns, in places that the seed chooses."""
    matrix = [list(row) for row in matrix_of(problem)]
    for step in range(extra):
        place, model, loss = _integers(3, 10**6, derive_seed(seed, "games.row", step))
        if kind == "dominated":
            row = [a - 1 - loss % 3 for a in matrix[model % len(matrix)]]
        else:
            row = _payoffs(len(matrix[0]), highest, derive_seed(seed, "games.row.random", step))
        matrix.insert(place % (len(matrix) + 1), row)
        place, model, loss = _integers(3, 10**6, derive_seed(seed, "games.column", step))
        if kind == "dominated":
            column = [row[model % len(row)] + 1 + loss % 3 for row in matrix]
        else:
            column = _payoffs(len(matrix), highest, derive_seed(seed, "games.column.random", step))
        place %= len(matrix[0]) + 1
        for row, a in zip(matrix, column, strict=True):
            row.insert(place, a)
    return (len(matrix), len(matrix[0]), *(a for row in matrix for a in row))


@cache
def _draw(sizes: str, count: int, highest: int, seed: int, stream: str) -> tuple[Problem, ...]:
    """Different games that are not constant, sizes in turn."""
    wanted, games, place = _sizes(sizes), dict[Problem, None](), 0
    while len(games) < count:
        rows, columns = wanted[len(games) % len(wanted)]
        payoffs = _payoffs(rows * columns, highest, derive_seed(seed, f"games.{stream}", place))
        place += 1
        if len(set(payoffs)) > 1:
            games[(rows, columns, *payoffs)] = None
        if place > 20 * count + 100:
            raise ValueError(
                f"task matrix_games: there are not {count} different games of {sizes} with payoffs up to {highest}: raise "
                "highest, or lower count"
            )
    return tuple(games)


def _integers(count: int, below: int, seed: int) -> list[int]:
    return [int(u * below) for u in uniforms(count, seed)]


def _payoffs(count: int, highest: int, seed: int) -> list[int]:
    return [n - highest for n in _integers(count, 2 * highest + 1, seed)]


def _sizes(text: str) -> list[tuple[int, int]]:
    found = [re.fullmatch(r"\s*([1-9]\d?)x([1-9]\d?)\s*", part) for part in text.split(",")]
    sizes = [(int(m[1]), int(m[2])) for m in found if m is not None]
    if len(sizes) != len(found) or any(rows * columns < 2 for rows, columns in sizes):
        raise ValueError(f"task matrix_games: sizes {text!r}: write rows x columns, e.g. 2x2,3x3")
    return sizes


def _spelled(shares: tuple[Fraction, ...]) -> str:
    return " , ".join(" ".join(f"{float(share):.2f}") for share in shares)


# Longer than any sound last line: a bound on the work that hostile text can cause.
_MAX_CHARACTERS = 4000
_AROUND = " \t[]()=:;,`$*"
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{0,9})?|\.\d{1,9})(?:/(\d{1,9}))?")


def read_strategies(text: str) -> tuple[list[float], list[float]] | None:
    """The two distributions of the last line, "x = [..], y = [..]" or "x .. ; y .."; None unless both are."""
    line = text.strip()[-_MAX_CHARACTERS:].rpartition("\n")[2].lower()
    before, _, after = line.rpartition("y")
    x, y = (_distribution(part) for part in (before.rpartition("x")[2], after))
    return None if x is None or y is None or "x" not in before else (x, y)


def _distribution(text: str) -> list[float] | None:
    shares = []
    for part in join_digits(text.lstrip(_AROUND).rstrip(_AROUND + ".")).split(","):
        found = _SHARE.fullmatch(part.replace(" ", ""))
        if found is None or (found[2] is not None and int(found[2]) == 0):
            return None
        shares.append(float(found[1]) / int(found[2] or 1))
    total = sum(shares)
    return [share / total for share in shares] if abs(total - 1) <= SUM_TOLERANCE else None

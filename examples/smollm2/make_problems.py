"""One-step arithmetic as continuations of two solved examples: JSON lines of prompts and answers, in two disjoint files.

    python -m examples.smollm2.make_problems runs/smollm2/problems

Products of one-digit numbers, sums of one-digit numbers, sums of a two-digit and a one-digit number: a third of the held-out
problems each. Of the last kind, which the model finds hardest, there are more to train on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

SHOTS = "6 * 3 = 18\n23 + 5 = 28\n"
SHOWN = {(6, "*", 3), (23, "+", 5)}
SMALL = range(2, 10)
KINDS = {"product": ("*", SMALL, 46), "sum": ("+", SMALL, 46), "longer sum": ("+", range(11, 50), 184)}
"""Each kind of problem: its sign, its first numbers, the second number being small, and how many are trained on."""
HELDOUT_EACH = 16
"""Held-out problems of each kind."""

type Problem = tuple[int, str, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write train.jsonl and heldout.jsonl")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, problems in split().items():
        lines = [json.dumps(row(problem)) + "\n" for problem in problems]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"problems: {folder / name}.jsonl, {len(problems)} of them")
    return 0


def split() -> dict[str, list[Problem]]:
    """The problems of train and heldout: as many of every kind, none in both."""
    draw = random.Random(0)
    found: dict[str, list[Problem]] = {"train": [], "heldout": []}
    for sign, firsts, trained in KINDS.values():
        problems = [(a, sign, b) for a in firsts for b in SMALL if (a, sign, b) not in SHOWN]
        draw.shuffle(problems)
        found["heldout"] += problems[:HELDOUT_EACH]
        found["train"] += problems[HELDOUT_EACH : HELDOUT_EACH + trained]
    return found


def row(problem: Problem) -> dict[str, str]:
    a, sign, b = problem
    return {"id": f"{a}{sign}{b}", "prompt": f"{SHOTS}{a} {sign} {b} =", "answer": str(a * b if sign == "*" else a + b)}


if __name__ == "__main__":
    sys.exit(main())

"""What further turns of a conversation changed: shares of a prompt's samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

TRANSITIONS = {
    (False, True): "repaired",
    (True, True): "held",
    (True, False): "broken",
    (False, False): "lost",
}
"""Whether one turn was right, and the next -> what happened between them."""


def transition_shares(turns_nK: Sequence[Sequence[bool]]) -> dict[str, float]:
    """``first_turn``: samples whose first answer is right; then the share of each transition among all adjacent turns.

    turns_nK: [n, K] whether each turn is right, K at least 2. The four transitions sum to 1, and with two turns
    first_turn + repaired - broken is the share of right final answers.
    """
    pairs = [pair for turns_K in turns_nK for pair in pairwise(turns_K)]
    shares = {"first_turn": sum(bool(turns_K[0]) for turns_K in turns_nK) / len(turns_nK)}
    return shares | {name: pairs.count(kind) / len(pairs) for kind, name in TRANSITIONS.items()}

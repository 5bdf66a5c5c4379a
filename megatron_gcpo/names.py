"""The nearest valid name, for errors about names that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most like ``name``, capitals aside; None when none is like it by ``cutoff`` (0: anything) in [0, 1]."""
    by_lower = {choice.lower(): choice for choice in sorted(known, reverse=True)}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """ " Did you mean X?", or nothing."""
    near = nearest(name, known)
    return "" if near is None else f" Did you mean {near}?"

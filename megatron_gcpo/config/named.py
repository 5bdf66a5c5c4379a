"""Options that are a choice among named parts, each with options of its own: ``expo``, or ``{name: adaptive, target:
0.1}``."""

from __future__ import annotations

from typing import Any


def by_name(value: Any) -> Any:
    """A bare name stands for the part with its defaults."""
    return {"name": value} if isinstance(value, str) else value

"""How commands speak to whoever typed them: tables of a readable width, mistakes as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

PLAIN_WIDTH = 120


def make_console() -> Console:
    """As wide as the terminal; where the output goes to a file or pipe, at least as wide as a table needs."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, PLAIN_WIDTH))


def exit_code(work: Callable[[], int | None]) -> int:
    """What ``work`` returns (None: 0); where it raises ValueError, 2, with the message as a line on stderr."""
    try:
        return work() or 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

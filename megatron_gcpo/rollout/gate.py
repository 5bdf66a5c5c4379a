"""One thread draws tokens; others stop it between two tokens, never within one, while they change what it draws from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Closed by any number of holders at once; whoever draws passes only while nobody holds it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holders = 0
        self._paused = False
        self._drawing = False

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Around a whole call that draws. Waits for holders, and for another thread that draws."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def step(self) -> None:
        """Between two tokens of the thread that draws: let holders have their turn, and return when they are done."""
        if self._holders or self._paused:
            self._leave()
            self._enter()

    @contextmanager
    def held(self) -> Iterator[None]:
        """No token is drawn inside."""
        with self._changed:
            self._holders += 1
            self._changed.wait_for(lambda: not self._drawing)
        try:
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    def pause(self) -> None:
        """Hold the gate until ``resume``; returns when no token is being drawn. Twice is once."""
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: not self._drawing)

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def _enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self._drawing or self._holders or self._paused))
            self._drawing = True

    def _leave(self) -> None:
        with self._changed:
            self._drawing = False
            self._changed.notify_all()

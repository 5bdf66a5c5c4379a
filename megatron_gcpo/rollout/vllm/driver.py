"""Requests of several callers through one vLLM engine whose steps are taken in this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any


class Driver:
    """Takes the engine's steps for whoever waits for an answer: threads may call ``run`` at the same time.

    Each step serves all requests under way, so that callers help each other; ``pause`` holds back every step.
    """

    def __init__(self, llm_engine: Any) -> None:
        self._engine = llm_engine
        self._turn = threading.Condition()
        self._paused = False
        self._names = itertools.count()
        self._answers: dict[str, Any] = {}

    def run(
        self,
        requests: Sequence[tuple[Sequence[int], Any]],
        require_fit: Callable[[], None],
        *,
        also_paused: bool = False,
        adapter: Any = None,
    ) -> list[Any]:
        """vLLM's final output of each (prompt token ids, SamplingParams), in their order.

        Args:
            require_fit: raises ValueError when the engine may not serve; asked before every step.
            also_paused: take steps during a pause too.
            adapter: vLLM's LoRARequest to answer with; None: the weights as they are.

        Raises:
            ValueError: the engine became unfit or failed; none of these requests is under way any more.
        """
        names = [f"{next(self._names)}" for _ in requests]
        try:
            with self._turn:
                require_fit()
                for name, (token_ids, params) in zip(names, requests, strict=True):
                    prompt = {"prompt_token_ids": list(token_ids)}
                    self._engine.add_request(name, prompt, params, lora_request=adapter)
            while not all(name in self._answers for name in names):
                with self._turn:
                    self._turn.wait_for(lambda: also_paused or not self._paused)
                    if not all(name in self._answers for name in names):  # another caller's step may have finished ours
                        require_fit()
                        self._step()
            return [self._answers[name] for name in names]
        finally:
            with self._turn:
                unanswered = [name for name in names if self._answers.pop(name, None) is None]
                if unanswered:
                    self._engine.abort_request(unanswered)

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._answers[output.request_id] = output

    def pause(self) -> None:
        """No step is taken from now on; returns when the one being taken has ended."""
        with self._turn:
            self._paused = True

    def resume(self) -> None:
        with self._turn:
            self._paused = False
            self._turn.notify_all()

    def between_steps(self) -> threading.Condition:
        """Held as a context manager, no step is being taken."""
        return self._turn

    @property
    def under_way(self) -> bool:
        """Whether there are requests to finish."""
        return self._engine.has_unfinished_requests()

    @property
    def busy(self) -> bool:
        """Whether requests are under way and no pause holds them back."""
        return self.under_way and not self._paused

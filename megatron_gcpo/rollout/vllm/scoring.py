"""The temperature of prompt log-probabilities, inside vLLM's workers."""

from __future__ import annotations

from typing import Any

import torch


class ScoreTemperature:
    """A part of the worker extension.

    vLLM computes the log-probabilities of a prompt from the bare logits. This puts a temperature there and nowhere else:
    requests that draw tokens at a temperature above 0 take another way through the sampler, so that they may be under
    way meanwhile.
    """

    model_runner: Any

    def set_score_temperature(self, temperature: float) -> None:
        """Score prompts under softmax(logits / temperature) from now on."""

        def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
            return (logits.float() / temperature).log_softmax(dim=-1)

        sampler = self.model_runner.sampler
        assert callable(sampler.compute_logprobs), f"got a {type(sampler).__name__} that does not compute log-probs"
        sampler.compute_logprobs = compute_logprobs

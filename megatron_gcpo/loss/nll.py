"""Negative log-likelihood: the supervised loss."""

from __future__ import annotations

import torch


def nll(logprobs_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """([T] loss in nats, [T] metrics): -log pi(token | its past), for supervised fine-tuning.

    No mask: the weights of ``reduce.token_weights`` are 0 off the mask. Metrics are detached: ``nll``.
    """
    return -logprobs_T, {"nll": -logprobs_T.detach()}

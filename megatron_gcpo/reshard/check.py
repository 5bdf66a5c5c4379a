"""Proof that the engine holds the trained policy: both sides score the same tokens, and the numbers must agree."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_gcpo.rollout.engine import RolloutEngine


@dataclass(frozen=True, kw_only=True)
class LogprobGap:
    """Absolute differences (nats) of trainer and engine log-probabilities over the tokens that both scored."""

    max: float
    mean: float
    num_tokens: int


def logprob_gap(
    trainer_logprobs: torch.Tensor, engine_logprobs: torch.Tensor, mask: torch.Tensor | None = None
) -> LogprobGap:
    """Compare log-probabilities of the same tokens.

    Args:
        trainer_logprobs, engine_logprobs: same shape, any float dtype, natural log, at the same temperature over the
            whole vocabulary.
        mask: same shape; tokens where it is 0 do not count. None: all count.

    Returns:
        The gap; infinite where either side is not finite, and zero over no tokens.
    """
    assert trainer_logprobs.shape == engine_logprobs.shape, (
        f"got log-probs of shapes {tuple(trainer_logprobs.shape)} and {tuple(engine_logprobs.shape)}, expected equal"
    )
    counted = torch.ones_like(trainer_logprobs, dtype=torch.bool) if mask is None else mask.bool()
    gaps = (trainer_logprobs.double() - engine_logprobs.double())[counted].abs()
    if gaps.numel() == 0:
        return LogprobGap(max=0.0, mean=0.0, num_tokens=0)
    gaps = gaps.nan_to_num(nan=math.inf)
    return LogprobGap(max=float(gaps.max()), mean=float(gaps.mean()), num_tokens=gaps.numel())


def default_gap_limit(dtype: torch.dtype) -> float:
    """The largest gap allowed when rollout.max_logprob_gap is not set: 1e-4 nats in float32, 5e-2 below."""
    return 1e-4 if dtype == torch.float32 else 5e-2


def require_small_gap(gap: LogprobGap, limit: float, engine: RolloutEngine) -> None:
    """Make the engine refuse to serve, and raise ValueError, unless the largest difference is within ``limit``."""
    if gap.num_tokens == 0:
        raise ValueError("the push was checked on no tokens at all: nothing is known of the engine's weights")
    if gap.max <= limit:
        return
    engine.refuse(f"their log-probs differ from the trainer's by up to {gap.max:.3g}, over the limit of {limit:.3g}")
    raise ValueError(
        f"after the push of policy version {engine.policy_version}, trainer and rollout engine disagree on the same "
        f"{gap.num_tokens} tokens: log-probs differ by {gap.max:.3g} at most and {gap.mean:.3g} on average, limit "
        f"{limit:.3g} (rollout.max_logprob_gap). The engine now refuses to serve. Likely causes, first to last: the "
        "two sides run in different dtypes (rollout.dtype, model.dtype); the temperature is applied on one side only; "
        "the name mapping of this model family is wrong, or a cached export is stale; a megatron: option changes the "
        "model's mathematics (rotary base, norm epsilon, tied embeddings)"
    )

"""Push the trained weights and prove that they arrived: trainer and engine score the same tokens."""

from __future__ import annotations

import torch

from megatron_gcpo.policy.actor import Actor
from megatron_gcpo.reshard.check import GapLimit, logprob_gap, require_small_gap
from megatron_gcpo.reshard.pusher import Pusher
from megatron_gcpo.rollout import RolloutEngine
from megatron_gcpo.types import TokenBatch


def verified_push(
    actor: Actor,
    pusher: Pusher,
    engine: RolloutEngine | None,
    probe: TokenBatch,
    *,
    temperature: float,
    limit: GapLimit,
    version: int | None = None,
) -> dict[str, float] | None:
    """Give the engine the policy's weights; collective over all ranks.

    Args:
        engine: on leaders; None on their peers.
        probe: a few sequences, the same on every rank of the replica.
        temperature: at which both sides score them.
        limit: what their log-probs may differ by.
        version: the policy version to serve as; None: one more than before.

    Returns:
        On leaders: max_logprob_gap and mean_logprob_gap (nats), policy_version, and PushStats.metrics. None elsewhere.

    Raises:
        ValueError: the push failed or the two sides disagree; the engine then refuses to serve.
    """
    stats = pusher.push(engine, version)
    trainer_T = actor.logprobs(probe).logprobs_T
    if engine is None:
        return None
    gap = logprob_gap(trainer_T, _engine_logprobs(engine, probe, temperature), probe.mask_T)
    require_small_gap(gap, limit, engine)
    return {
        "max_logprob_gap": gap.max,
        "mean_logprob_gap": gap.mean,
        "policy_version": float(engine.policy_version),
        **stats.metrics(),
    }


def _engine_logprobs(engine: RolloutEngine, probe: TokenBatch, temperature: float) -> torch.Tensor:
    """[T] float32 of the probe's completion tokens, 0 elsewhere."""
    sequences = []
    for start, end in zip(probe.cu_seqlens_N1[:-1].tolist(), probe.cu_seqlens_N1[1:].tolist(), strict=True):
        first = start + int((probe.mask_T[start:end] == 0).sum())
        sequences.append((probe.tokens_T[start:first].tolist(), probe.tokens_T[first:end].tolist()))
    scored_T = torch.zeros(len(probe.tokens_T))
    scored_T[probe.mask_T.bool()] = torch.cat([torch.from_numpy(s) for s in engine.score(sequences, temperature)])
    return scored_T

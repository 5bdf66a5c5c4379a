"""Push the trained weights and prove that they arrived: trainer and engine score the same tokens."""

from __future__ import annotations

import torch

from megatron_gcpo.policy.actor import Actor
from megatron_gcpo.reshard.check import logprob_gap, require_small_gap
from megatron_gcpo.reshard.push import push
from megatron_gcpo.rollout import RolloutEngine
from megatron_gcpo.types import TokenBatch


def verified_push(
    actor: Actor,
    engine: RolloutEngine | None,
    probe: TokenBatch,
    *,
    temperature: float,
    max_gap: float,
    version: int | None = None,
) -> dict[str, float] | None:
    """Give the engine the policy's weights; collective over all ranks.

    Args:
        engine: on leaders; None on their peers.
        probe: a few sequences, the same on every rank of the replica.
        temperature: at which both sides score them.
        max_gap: largest difference of log-probs allowed, nats.
        version: the policy version to serve as; None: one more than before.

    Returns:
        On leaders: max_logprob_gap and mean_logprob_gap (nats), bytes, policy_version. None elsewhere.

    Raises:
        ValueError: the push failed or the two sides disagree; the engine then refuses to serve.
    """
    pushed = push(actor.export(), engine, version=version)
    trainer_T = actor.logprobs(probe).logprobs_T
    if engine is None:
        return None
    gap = logprob_gap(trainer_T, _engine_logprobs(engine, probe, temperature), probe.mask_T)
    require_small_gap(gap, max_gap, engine)
    return {
        "max_logprob_gap": gap.max,
        "mean_logprob_gap": gap.mean,
        "bytes": float(pushed.num_bytes),
        "policy_version": float(engine.policy_version),
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

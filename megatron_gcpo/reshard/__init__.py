"""Weights from the training layout to the rollout engine, and the proof that they arrived."""

from megatron_gcpo.reshard.check import LogprobGap, default_gap_limit, logprob_gap, require_small_gap
from megatron_gcpo.reshard.push import PushStats, push

__all__ = ["LogprobGap", "PushStats", "default_gap_limit", "logprob_gap", "push", "require_small_gap"]

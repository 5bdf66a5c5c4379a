"""Sampling completions: the engine protocol, the embedded transformers engine, and groups of rollouts.

The engine itself is imported from ``rollout.transformers_engine``, so that who only needs the protocol does not pay for
importing transformers.
"""

from megatron_gcpo.rollout.engine import RolloutEngine, Sample, SampleRequest, Sampling
from megatron_gcpo.rollout.groups import generate_groups

__all__ = ["RolloutEngine", "Sample", "SampleRequest", "Sampling", "generate_groups"]

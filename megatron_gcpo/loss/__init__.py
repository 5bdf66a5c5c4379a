"""Pure maths of the losses: token in, token out; how tokens add up is in ``reduce``."""

from megatron_gcpo.loss.kl import KL_ESTIMATORS, k1, k2, k3
from megatron_gcpo.loss.nll import nll
from megatron_gcpo.loss.policy import cispo, geometric_mean_of_clipped, reinforce, sequence_clip, soft_gate
from megatron_gcpo.loss.reduce import Reduction, Totals, count, token_weights
from megatron_gcpo.loss.surrogate import ppo_clip

__all__ = [
    "KL_ESTIMATORS",
    "Reduction",
    "Totals",
    "cispo",
    "count",
    "geometric_mean_of_clipped",
    "k1",
    "k2",
    "k3",
    "nll",
    "ppo_clip",
    "reinforce",
    "sequence_clip",
    "soft_gate",
    "token_weights",
]

"""Rotary angles that stay exact far into a packed row.

With packing a sequence may begin anywhere in its row. Its attention depends on differences of positions only, but the
angle position x frequency in fp32 is off by up to position x 6e-8 radians, and at a few hundred positions an unlikely
token's log-probability moves by 1e-4: as much as a wrong weight might. Angles matter only modulo 2 pi, so they are made in
fp64 and reduced before they are rounded: off by 2e-7 radians at any position.
"""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import torch

from megatron_gcpo.policy.model import Policy, unwrapped


def make_rotary_exact(policy: Policy) -> None:
    """Change how every RotaryEmbedding of the policy computes its angles; other position embeddings are left alone."""
    for model in unwrapped(policy):
        rotary: Any = getattr(model, "rotary_pos_emb", None)
        if hasattr(rotary, "get_freqs_non_repeated"):
            rotary.get_freqs_non_repeated = MethodType(_angles, rotary)


def _angles(self: Any, max_seq_len: int, offset: int = 0) -> torch.Tensor:
    """[max_seq_len, dim / 2] angles in [0, 2 pi), in the frequencies' dtype."""
    position_S = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float64) + offset
    if self.seq_len_interpolation_factor is not None:
        position_S = position_S / self.seq_len_interpolation_factor
    angles = torch.outer(position_S, self.inv_freq.double()) % (2 * math.pi)
    return angles.to(self.inv_freq.dtype)

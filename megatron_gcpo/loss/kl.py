"""Per-token estimators of KL(policy || reference) from tokens sampled by the policy (Schulman 2020, "Approximating KL
divergence"). An estimator's mean and the mean of its gradient are different questions:

    with d = log pi - log ref of the sampled token, r = ref / pi = exp(-d), expectations over tokens drawn from pi:

    estimator        mean               gradient of the estimator           mean gradient
    k1 = d           KL(pi || ref)      grad log pi                         0: as a loss term it only adds noise
    k2 = d^2 / 2     KL + O(d^3)        d grad log pi                       grad KL(pi || ref), exactly
    k3 = r - 1 + d   KL(pi || ref)      (1 - r) grad log pi                 grad KL(ref || pi), the other direction

(derived: the mean of grad log pi is 0, of r grad log pi it is -grad KL(ref || pi)). k3 >= 0 and has low variance while
the policies are close, hence the usual choice; k2 is the one whose gradient is that of the divergence it names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

MAX_LOG_RATIO = 20.0
"""Above it exp continues as its tangent, so that k3 and its gradient stay finite and keep their direction."""


def k1(logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor) -> torch.Tensor:
    """[T] log pi - log ref, nats. Unbiased, any sign; no use as a loss term (see above)."""
    return logprobs_T - ref_logprobs_T.detach()


def k2(logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor) -> torch.Tensor:
    """[T] (log pi - log ref)^2 / 2, nats. Biased in value, exact in gradient."""
    return k1(logprobs_T, ref_logprobs_T).square() / 2


def k3(logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor) -> torch.Tensor:
    """[T] ref / pi - 1 - log(ref / pi), nats. Unbiased, never negative."""
    d_T = k1(logprobs_T, ref_logprobs_T)
    cut_T = (-d_T).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(cut_T) + math.exp(MAX_LOG_RATIO) * (-d_T - cut_T) + d_T


KL_ESTIMATORS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"k1": k1, "k2": k2, "k3": k3}
)

"""What to do about the gap between the policy that drew the tokens (mu) and the one that learns from them (pi).

The two differ when the rollouts are older than the weights, when the engine is quantized, or through mere rounding. With
the ratio rho_t = pi(token) / mu(token), pi before the first update of the step, every kind gives one constant weight per
token that multiplies its loss; no gradient flows through it:

    kind           weight of a token                       bounds        source
    token_tis      rho_t, cut to [low, high]               [0, 2]        truncated importance sampling (Ionides 2008); the
                                                                         bound that RL libraries use
    sequence_tis   prod over the row of rho, cut           [0, 2]        the same at the row
    masked         rho_t within [low, high], else 0        [0.5, 5]      IcePop, Ring-1T report, arXiv 2510.18855
    geometric      1 where the row's geometric mean of     [0.99, 1.01]  sequence masking by a length-free ratio; bounds
                   rho is within [low, high], else 0                     are ours
    ais            1 + lambda (cut rho_t - 1)              [0, 2]        adaptive; our reconstruction, see ``blend``

Means over the batch keep their denominators: a token of weight 0 counts as one that pushes nowhere.
What they promise (derived; E over tokens drawn from mu, f any function): E[rho f] is the mean of f under pi, exactly; cutting
at C leaves a bias of at most max|f| x the mass (pi - C mu)+ that was cut, and bounds the second moment of the weights by C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from megatron_gcpo.loss.kl import MAX_LOG_RATIO, k1, k3
from megatron_gcpo.types import TokenBatch

MOMENTS = (
    "tokens",
    "k1",
    "k3",
    "ratio",
    "ratio_squared",
    "rows",
    "row_ratio",
    "row_ratio_squared",
    "signal",
    "weighted_signal",
    "cut",
    "masked",
)
"""What is summed over the batch, see ``moments``."""


def weights(kind: str, batch: TokenBatch, low: float, high: float, blend: float = 1.0) -> torch.Tensor:
    """[T] float32 constant weights of these whole rows, 0 off the mask; exactly 1 where old and rollout log-probs agree.

    batch: with old_logprobs_T and rollout_logprobs_T. low, high: the bounds. blend: lambda of ``ais``.
    """
    ratio_T = _log_ratio(batch).exp()
    match kind:
        case "token_tis" | "ais":
            weight_T = ratio_T.clamp(low, high)
        case "masked":
            weight_T = torch.where(_within(ratio_T, low, high), ratio_T, 0.0)
        case "sequence_tis":
            weight_T = _spread(_row_log_ratio(batch).exp().clamp(low, high), batch)
        case "geometric":
            mean_N = _row_log_ratio(batch) / _row_sums(batch, batch.mask_T).clamp(min=1)
            weight_T = _spread(_within(mean_N.exp(), low, high).double(), batch)
        case _:
            raise ValueError(f"correction.kind {kind!r} has no weights")
    if kind == "ais":
        weight_T = 1 + blend * (weight_T - 1)
    return (weight_T * batch.mask_T).float()


ROW_LOCAL = frozenset({"token_tis", "sequence_tis", "masked", "geometric"})
"""Kinds whose weights need nothing but their own row."""


def in_update(
    kind: str, batch: TokenBatch, logprobs_T: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """([T] weights, [T] diagnostics) of a ROW_LOCAL kind from the update's own forward pass.

    At the first update of a step the current policy is the old one, so that no pass before it is needed. Of the diagnostics,
    means over tokens: correction_kl_k1 and _kl_k3 (nats), _ratio and _ratio_squared, _changed (weight is not the ratio).

    logprobs_T: of the current policy; no gradient flows through the result.
    """
    assert kind in ROW_LOCAL, f"got {kind}, expected one of {sorted(ROW_LOCAL)}"
    own = replace(batch, old_logprobs_T=logprobs_T.detach())
    weight_T, log_ratio_T = weights(kind, own, low, high), _log_ratio(own)
    ratio_T = log_ratio_T.exp()
    seen = {
        "kl_k1": -log_ratio_T,
        "kl_k3": ratio_T - 1 - log_ratio_T,
        "ratio": ratio_T,
        "ratio_squared": ratio_T.square(),
        "changed": (weight_T.double() - ratio_T).abs() > 1e-6,
    }
    return weight_T, {f"correction_{name}": value.float() for name, value in seen.items()}


def moments(kind: str, batch: TokenBatch, low: float, high: float) -> torch.Tensor:
    """[len(MOMENTS)] float64 sums over trained tokens (or rows with one) of this batch; those of several batches add up.

    k1, k3: estimates of KL(mu || pi), nats. ratio: rho_t, row_ratio: their product over a row (its log cut to +-20).
    signal: A^2, weighted_signal: (w A)^2 with rho cut to the bounds. cut: tokens whose ratio is out of bounds (tis, ais).
    masked: tokens of weight 0 (masked, geometric).
    """
    mask_T = batch.mask_T.double()
    log_ratio_T = _log_ratio(batch)
    ratio_T = log_ratio_T.exp()
    rows_N = _row_sums(batch, batch.mask_T) > 0
    row_ratio_N = _row_log_ratio(batch).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[rows_N]
    advantages_T = batch.advantages_T.double()
    nothing_T = torch.zeros_like(mask_T)
    cut_T, masked_T, weight_T = nothing_T, nothing_T, ratio_T
    if kind != "none":
        weight_T = weights(kind, batch, low, high).double()
        masked_T = (weight_T == 0).double() if kind in ("masked", "geometric") else nothing_T
    if kind in ("token_tis", "ais"):
        cut_T = (~_within(ratio_T, low, high)).double()
    elif kind == "sequence_tis":
        cut_T = _spread((~_within(_row_log_ratio(batch).exp(), low, high)).double(), batch)
    per_token = {
        "tokens": mask_T,
        "k1": k1(-log_ratio_T, nothing_T),
        "k3": k3(-log_ratio_T, nothing_T),
        "ratio": ratio_T,
        "ratio_squared": ratio_T.square(),
        "signal": advantages_T.square(),
        "weighted_signal": (weight_T * advantages_T).square(),
        "cut": cut_T,
        "masked": masked_T,
    }
    sums = {name: (values_T * mask_T).sum() for name, values_T in per_token.items()}
    sums |= {
        "rows": rows_N.double().sum(),
        "row_ratio": row_ratio_N.sum(),
        "row_ratio_squared": row_ratio_N.square().sum(),
    }
    return torch.stack([sums[name] for name in MOMENTS])


def blend(sums: Mapping[str, float], kappa: float) -> float:
    """lambda of ``ais`` in [0, 1]: how much of the importance weights to apply, from the moments of the global batch.

    AIS publishes that three batch diagnostics give one lambda and that the gradient is (1 - lambda) g + lambda g_IS. Which
    functions is not public; ours is the product of

        1 - exp(-k3 / kappa)                       nothing to correct while the policies agree
        ESS of the rows' ratios, of 1              how far the ratios can be trusted
        1 / max(1, E[(w A)^2] / E[A^2])            what they add to the variance of the gradient
    """
    divergence = max(0.0, sums["k3"]) / max(1.0, sums["tokens"])
    gap = 1 - math.exp(-divergence / kappa)
    growth = sums["weighted_signal"] / sums["signal"] if sums["signal"] > 0 else 1.0
    return gap * _ess(sums["rows"], sums["row_ratio"], sums["row_ratio_squared"]) / max(1.0, growth)


def correct(
    batch: TokenBatch,
    kind: str,
    *,
    low: float,
    high: float,
    kappa: float,
    sum_over_replicas: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[TokenBatch, dict[str, float]]:
    """A replica's batch of a step with ``correction_T`` (left None by kind none), and what was seen of the gap.

    What couples rows is computed here, once, over all replicas; in the micro-batches the weights are constants.

    Args:
        batch: with old_logprobs_T and rollout_logprobs_T.
        sum_over_replicas: [K] float64 -> its sum over the replicas; collective.

    Returns:
        The batch, and over the global batch: kl_k1, kl_k3 (nats, of KL(rollout || old)); ess_token, ess_sequence
        (effective sample size of the ratios as a share of all); cut_share, masked_share (of tokens); blend (ais only).
        Of this replica: ratio_p01, ratio_p50, ratio_p99. Empty when no token is trained anywhere.
    """
    sums: dict[str, float] = dict(
        zip(MOMENTS, sum_over_replicas(moments(kind, batch, low, high)).tolist(), strict=True)
    )
    share = blend(sums, kappa) if kind == "ais" else 1.0
    if kind != "none":
        batch = replace(batch, correction_T=weights(kind, batch, low, high, share))
    seen = _percentiles(batch)
    if tokens := sums["tokens"]:
        seen |= {
            "kl_k1": sums["k1"] / tokens,
            "kl_k3": sums["k3"] / tokens,
            "ess_token": _ess(tokens, sums["ratio"], sums["ratio_squared"]),
            "ess_sequence": _ess(sums["rows"], sums["row_ratio"], sums["row_ratio_squared"]),
            "cut_share": sums["cut"] / tokens,
            "masked_share": sums["masked"] / tokens,
        }
    return batch, seen | ({"blend": share} if kind == "ais" else {})


def _percentiles(batch: TokenBatch) -> dict[str, float]:
    ratios_T = _log_ratio(batch).exp()[batch.mask_T.bool()]
    if not len(ratios_T):
        return {}
    # not torch.quantile, which refuses more than 16 million values
    ordered_T = ratios_T.sort().values
    at = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}
    return {name: float(ordered_T[round(share * (len(ordered_T) - 1))]) for name, share in at.items()}


def _ess(count: float, total: float, total_of_squares: float) -> float:
    """(sum w)^2 / (n sum w^2), in (0, 1]; 1 of nothing."""
    return total**2 / (count * total_of_squares) if total_of_squares > 0 else 1.0


def _log_ratio(batch: TokenBatch) -> torch.Tensor:
    """[T] float64 log rho, cut to +-20, 0 off the mask."""
    assert batch.old_logprobs_T is not None, "got no old log-probs, expected those of the trainer before the update"
    assert batch.rollout_logprobs_T is not None, "got no rollout log-probs, expected the engine's"
    log_ratio_T = batch.old_logprobs_T.double() - batch.rollout_logprobs_T.double()
    return torch.where(batch.mask_T > 0, log_ratio_T, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _row_log_ratio(batch: TokenBatch) -> torch.Tensor:
    """[N] float64 sum over each row; 0 for a row without a trained token."""
    return _row_sums(batch, _log_ratio(batch))


def _row_sums(batch: TokenBatch, values_T: torch.Tensor) -> torch.Tensor:
    row_T = torch.arange(batch.num_rows, device=values_T.device).repeat_interleave(batch.lengths_N)
    return values_T.new_zeros(batch.num_rows, dtype=torch.float64).index_add_(0, row_T, values_T.double())


def _spread(values_N: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    return values_N.repeat_interleave(batch.lengths_N)


def _within(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (ratio >= low) & (ratio <= high)

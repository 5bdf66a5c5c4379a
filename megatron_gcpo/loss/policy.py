"""Policy losses beside the clipped surrogate: other ways in which the ratio to the old policy enters.

All take the log-probabilities of the current and the old policy and advantages, and give ([T] loss, [T] detached metrics).
The gradient flows into the current log-probabilities only. Off-mask tokens have advantage 0, hence no gradient; their
weight is 0 as well (loss.reduce). A loss of whole rows is given to each of the row's tokens, so that a mean over its
tokens is the row's loss: with ``sequence_mean_token_mean`` rows weigh the same.
"""

from __future__ import annotations

import torch

from megatron_gcpo.loss.kl import k3
from megatron_gcpo.loss.rows import on_tokens, row_means, row_sums, trained_tokens
from megatron_gcpo.loss.surrogate import MAX_LOG_RATIO, ppo_clip
from megatron_gcpo.types import TokenBatch

type TokenLosses = tuple[torch.Tensor, dict[str, torch.Tensor]]

GEOMETRIC = 1e-4
"""Exponents nearer to 0 than this are the geometric mean, their limit."""


def reinforce(logprobs_T: torch.Tensor, old_logprobs_T: torch.Tensor, advantages_T: torch.Tensor) -> TokenLosses:
    """-A log pi: the score-function gradient, whatever the ratio. Metrics: ``ratio``, ``old_kl``."""
    return -advantages_T.detach() * logprobs_T, _ratio_metrics(logprobs_T, old_logprobs_T)


def cispo(
    logprobs_T: torch.Tensor, old_logprobs_T: torch.Tensor, advantages_T: torch.Tensor, low: float, high: float
) -> TokenLosses:
    """-sg(clip(rho, 1 - low, 1 + high)) A log pi: the clip bounds a token's weight and takes no token out (CISPO,
    arXiv 2506.13585). Metrics: ``ratio``, ``old_kl``, ``clip_fraction`` (share of tokens whose weight is bounded)."""
    metrics = _ratio_metrics(logprobs_T, old_logprobs_T)
    weight_T = metrics["ratio"].clamp(1 - low, 1 + high)
    clipped_T = (weight_T != metrics["ratio"]) & (advantages_T != 0)
    return -weight_T * advantages_T.detach() * logprobs_T, {**metrics, "clip_fraction": clipped_T.to(weight_T.dtype)}


def soft_gate(
    logprobs_T: torch.Tensor, old_logprobs_T: torch.Tensor, advantages_T: torch.Tensor, tau_pos: float, tau_neg: float
) -> TokenLosses:
    """-A (4 / tau) sigmoid(tau (rho - 1)), tau by the sign of A (SAPO, arXiv 2511.20347).

    Its gradient is REINFORCE's at rho = 1 and falls off smoothly on both sides. Metrics: ``ratio``, ``old_kl``.
    """
    advantages_T = advantages_T.detach()
    ratio_T = (logprobs_T - old_logprobs_T.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    tau_T = torch.where(advantages_T > 0, tau_pos, tau_neg)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T
    return -advantages_T * gate_T, _ratio_metrics(logprobs_T, old_logprobs_T)


def sequence_clip(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    batch: TokenBatch,
    low: float,
    high: float,
    power: float = 0.0,
) -> TokenLosses:
    """PPO's clipped surrogate with one ratio for a row: the power mean of its tokens' ratios,

        rho_p = (mean_t r_t^p)^(1/p),    p -> 0: exp(mean_t log r_t)

    p = 0 is GSPO (arXiv 2507.18071), annealed p HoelderPO (arXiv 2605.12058): grad rho = rho sum_t W_t grad log pi_t with
    W_t = r_t^p / sum r^p. Computed in logarithms; the clip is on the row. A row's advantage is the mean of its tokens'.
    Metrics of ``ppo_clip``, on tokens.
    """
    log_ratio_T = (logprobs_T - old_logprobs_T.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if abs(power) < GEOMETRIC:
        log_rho_N = row_means(log_ratio_T, batch)
    else:
        # each row's largest term is taken out of the exponential
        scaled_T = torch.where(batch.mask_T > 0, power * log_ratio_T, -torch.inf)
        top_N = logprobs_T.new_full((batch.num_rows,), -torch.inf)
        rows_T = on_tokens(torch.arange(batch.num_rows, device=logprobs_T.device), batch)
        top_N = top_N.scatter_reduce(0, rows_T, scaled_T.detach(), "amax")
        top_N = torch.where(top_N.isfinite(), top_N, 0)
        terms_N = row_sums((power * log_ratio_T - on_tokens(top_N, batch)).clamp(max=0).exp(), batch)
        count_N = trained_tokens(batch).to(terms_N.dtype)
        filled_N = torch.where(count_N > 0, terms_N, 1)
        log_rho_N = (filled_N.log() + top_N - count_N.clamp(min=1).log()) / power
    advantages_N = row_means(batch.advantages_T, batch).to(log_rho_N.dtype)
    loss_N, metrics = ppo_clip(log_rho_N, torch.zeros_like(log_rho_N), advantages_N, low, high)
    return on_tokens(loss_N, batch), {name: on_tokens(value, batch) for name, value in metrics.items()}


def geometric_mean_of_clipped(
    logprobs_T: torch.Tensor, old_logprobs_T: torch.Tensor, batch: TokenBatch, low: float, high: float
) -> TokenLosses:
    """-A exp(mean_t m_t): each token's log-ratio m is clipped first, then a row takes their mean (GMPO, arXiv 2507.20673).

    m = min(log r, high) for A > 0, max(log r, -low) for A < 0: bounds on the logarithm, one-sided as PPO's.
    Metrics: ``ratio`` and ``old_kl`` of tokens, ``clip_fraction``.
    """
    log_ratio_T = (logprobs_T - old_logprobs_T.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages_N = row_means(batch.advantages_T, batch).to(log_ratio_T.dtype)
    gains_T = on_tokens(advantages_N, batch) > 0
    bounded_T = torch.where(gains_T, log_ratio_T.clamp(max=high), log_ratio_T.clamp(min=-low))
    loss_N = -advantages_N * row_means(bounded_T, batch).exp()
    clipped_T = (bounded_T != log_ratio_T).to(log_ratio_T.dtype) * (batch.mask_T > 0)
    return on_tokens(loss_N, batch), {**_ratio_metrics(logprobs_T, old_logprobs_T), "clip_fraction": clipped_T}


def _ratio_metrics(logprobs_T: torch.Tensor, old_logprobs_T: torch.Tensor) -> dict[str, torch.Tensor]:
    log_ratio_T = (logprobs_T - old_logprobs_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {"ratio": log_ratio_T.exp(), "old_kl": k3(old_logprobs_T.detach(), logprobs_T.detach())}

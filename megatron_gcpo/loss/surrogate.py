"""The clipped surrogate of PPO, token by token."""

from __future__ import annotations

import torch

from megatron_gcpo.loss.kl import k3

MAX_LOG_RATIO = 20.0
"""Log ratios are cut here, without gradient beyond: e^20 is far outside every clip range, e^89 infinite in float32."""


def ppo_clip(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """([T] loss, [T] metrics): -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = exp(logp - old logp).

    PPO, arXiv 1707.06347; two clip ranges as in DAPO, arXiv 2503.14476. ``dual_clip`` = c > 1 bounds the loss of a
    token with A < 0 by -c A, however large its ratio (arXiv 1912.09729). No mask: off-mask tokens have advantage 0,
    thus loss and gradient 0. All inputs [T] float32; the gradient flows into ``logprobs_T`` only. Metrics are
    detached:

    ratio              rho
    clip_fraction      1 where a clip took the gradient away, else 0 (both kinds; mean over tokens = clipped share)
    dual_clip_fraction 1 where it was the dual clip (only with ``dual_clip``)
    old_kl             k3 estimate of KL(old || current), nats
    """
    old_logprobs_T, advantages_T = old_logprobs_T.detach(), advantages_T.detach()
    log_ratio_T = logprobs_T - old_logprobs_T
    ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_T = ratio_T * advantages_T
    bound_T = ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    gain_T = torch.minimum(free_T, bound_T)
    clipped_T = bound_T < free_T
    metrics = {"ratio": ratio_T.detach()}
    if dual_clip is not None:
        worst_T = dual_clip * advantages_T
        dual_T = (advantages_T < 0) & (gain_T < worst_T)
        gain_T = torch.where(dual_T, worst_T, gain_T)
        clipped_T = clipped_T | dual_T
        metrics["dual_clip_fraction"] = dual_T.to(ratio_T.dtype)
    metrics["clip_fraction"] = clipped_T.to(ratio_T.dtype)
    metrics["old_kl"] = k3(old_logprobs_T, logprobs_T.detach())
    return -gain_T, metrics

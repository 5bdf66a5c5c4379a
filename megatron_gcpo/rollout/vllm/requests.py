"""Our requests as vLLM's sampling parameters, and vLLM's answers as samples. Plain values, in process and over HTTP alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megatron_gcpo.rollout.engine import Sample, SampleRequest, Sampling

LOGPROBS_MODE = "processed_logprobs"
"""vLLM's name for log-probabilities under the distribution that tokens are drawn from; its default leaves the temperature
and the cuts out."""


TEMPERATURES = (0.01, 2.0)
"""What vLLM takes; it would raise smaller ones to the first without a word."""


def sampling_params(request: SampleRequest, sampling: Sampling) -> dict[str, Any]:
    """Fields of vLLM's SamplingParams that draw one completion; JSON values.

    The temperature is never vLLM's 0: with ``top_k == 1`` the one token left has log-probability 0, as ``Sampling`` says.

    Raises ValueError for a temperature that vLLM does not take.
    """
    if not TEMPERATURES[0] <= sampling.temperature <= TEMPERATURES[1]:
        raise ValueError(
            f"vLLM takes temperatures from {TEMPERATURES[0]} to {TEMPERATURES[1]:g}, got {sampling.temperature}: change "
            "rollout.temperature (or evaluate.temperature), or use rollout.engine=transformers"
        )
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        # vLLM's generators take a signed or an unsigned 64-bit number, and -1 means none: stay inside 63 bits
        "seed": request.seed & (2**63 - 1),
        "max_tokens": request.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        # what ends a completion is said by stop_token_ids alone
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def scoring_params() -> dict[str, Any]:
    """Fields of vLLM's SamplingParams for a prompt whose own log-probabilities are wanted; JSON values.

    Their temperature is set on the workers (``scoring.ScoreTemperature``): vLLM applies none to prompts.
    """
    return {
        "n": 1,
        "temperature": 1.0,
        "seed": 0,  # one token must be drawn, and not with random numbers of the process
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "ignore_eos": True,
        "detokenize": False,
    }


def sample_of(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    spans: Iterable[tuple[str, int, int]],
    who: str,
    routed_experts: np.ndarray | None = None,
) -> Sample:
    """One completion as a Sample.

    Args:
        logprobs: natural log, of the sampled token at each position.
        finish_reason: vLLM's: "stop" or "length"; any other is an incomplete answer.
        spans: (version, start, end) of the tokens that one set of weights drew.
        who: names the request in errors.
        routed_experts: as ``Sample`` wants them.

    Raises:
        ValueError: the answer is incomplete or contradicts itself.
    """
    if finish_reason not in ("stop", "length"):
        raise ValueError(
            f"vLLM ended {who} with {finish_reason!r} after {len(token_ids)} tokens instead of completing it"
        )
    if not token_ids or len(logprobs) != len(token_ids):
        raise ValueError(f"vLLM answered {who} with {len(token_ids)} tokens and {len(logprobs)} log-probs")
    logprobs_T = np.asarray(logprobs, dtype=np.float32)
    if not np.isfinite(logprobs_T).all():
        raise ValueError(f"vLLM answered {who} with log-probs that are not finite: its weights are unfit")
    return Sample(
        token_ids=np.asarray(token_ids, dtype=np.int64),
        logprobs=logprobs_T,
        finish_reason=finish_reason,
        versions_T=versions_of(spans, len(token_ids), who),
        routed_experts=routed_experts,
    )


def versions_of(spans: Iterable[tuple[str, int, int]], num_tokens: int, who: str) -> np.ndarray:
    """[T] int32 policy version of each token. Raises ValueError where the spans do not cover the tokens once."""
    versions_T = np.full(num_tokens, -1, dtype=np.int32)
    for version, start, end in spans:
        if not version.isdecimal():
            raise ValueError(f"vLLM drew tokens of {who} with weights {version!r} that were never committed")
        versions_T[start:end] = int(version)
    if (versions_T < 0).any():
        raise ValueError(f"vLLM did not say which weights drew {int((versions_T < 0).sum())} tokens of {who}")
    return versions_T


def padded_experts(routed: np.ndarray | None, num_tokens: int) -> np.ndarray | None:
    """vLLM's [computed tokens, layers, k] with -1 for the tokens of the sequence that were not computed, as int16."""
    if routed is None:
        return None
    experts = np.full((num_tokens, *routed.shape[1:]), -1, dtype=np.int16)
    experts[: len(routed)] = routed[:num_tokens]
    return experts

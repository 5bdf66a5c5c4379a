"""What drawn tokens themselves show to be wrong, without any log-probability. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_gcpo.rollout.engine import Sample, SampleRequest, Sampling


def token_facts(
    requests: Sequence[SampleRequest],
    samples: Sequence[Sample],
    sampling: Sampling,
    *,
    vocab_size: int,
) -> tuple[str, ...]:
    """Violations of the engine's contract about ids, stops and lengths, one line each; empty when there are none.

    vocab_size: of the model. A tokenizer may know more ids, as long as none of them is used.
    """
    found: list[str] = []
    stops = set(sampling.stop_token_ids)
    if beyond := sorted(stop for stop in stops if not 0 <= stop < vocab_size):
        found.append(f"stop ids {beyond} are outside the model's vocabulary of {vocab_size}")
    pairs = list(zip(requests, samples, strict=True))
    if beyond := sum(any(not 0 <= i < vocab_size for i in r.prompt_token_ids) for r in requests):
        found.append(f"{beyond} of {len(pairs)} prompts hold ids outside the model's vocabulary of {vocab_size}")
    counts = {
        f"hold ids outside the vocabulary of {vocab_size}": sum(
            bool(((s.token_ids < 0) | (s.token_ids >= vocab_size)).any()) for _, s in pairs
        ),
        f"go on after one of the stop ids {sorted(stops)}": sum(
            bool(np.isin(s.token_ids[:-1], list(stops)).any()) for _, s in pairs
        ),
        f"say they stopped, but end on none of the stop ids {sorted(stops)}": sum(
            s.finish_reason == "stop" and (len(s.token_ids) == 0 or int(s.token_ids[-1]) not in stops) for _, s in pairs
        ),
        "say they reached their length, but have another one or end on a stop id": sum(
            s.finish_reason == "length" and (len(s.token_ids) != r.max_new_tokens or int(s.token_ids[-1]) in stops)
            for r, s in pairs
        ),
        "have another number of log-probs than of tokens": sum(len(s.logprobs) != len(s.token_ids) for _, s in pairs),
        "have log-probs above 0 or that are no numbers": sum(not bool((s.logprobs <= 1e-3).all()) for _, s in pairs),
    }
    return (*found, *(f"{count} of {len(pairs)} completions {what}" for what, count in counts.items() if count))

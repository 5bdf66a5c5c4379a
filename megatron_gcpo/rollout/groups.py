"""Prompts in, groups of rollouts out: one engine call for all of them, every sample with its own derived seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_gcpo.rollout.engine import RolloutEngine, SampleRequest, Sampling, check_fits
from megatron_gcpo.seeds import derive_seed
from megatron_gcpo.types import Group, Prompt, Rollout


def generate_groups(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    max_new_tokens: int,
    sampling: Sampling,
    decode: Callable[[list[int]], str],
    run_seed: int,
    step: int,
    stream: str = "rollout",
) -> list[Group]:
    """Sample ``group_size`` completions of each prompt, in the order of ``prompts``.

    Args:
        decode: completion token ids -> text without special tokens.
        run_seed, step, stream: with the prompt's id and the sample's index they derive the seed of each sample, so the
            result does not depend on how prompts are shared among replicas.

    Raises:
        ValueError: a prompt and ``max_new_tokens`` exceed the model's positions (raised before any token is drawn), or
            one prompt id occurs twice in the call.
    """
    for prompt in prompts:
        check_fits(len(prompt.token_ids), max_new_tokens, engine.max_positions, f"prompt {prompt.id!r}")
    ids = [prompt.id for prompt in prompts]
    if len(set(ids)) != len(ids):
        twice = sorted({i for i in ids if ids.count(i) > 1})
        raise ValueError(
            f"prompt ids must be unique within a step, or their samples would be copies of each other: {twice[:5]} "
            "occur more than once; make data.*.id_column unique"
        )
    requests = [
        SampleRequest(
            prompt_token_ids=tuple(prompt.token_ids),
            seed=derive_seed(run_seed, stream, step, prompt.id, sample),
            max_new_tokens=max_new_tokens,
        )
        for prompt in prompts
        for sample in range(group_size)
    ]
    seeds = {request.seed for request in requests}
    assert len(seeds) == len(requests), f"got {len(seeds)} distinct seeds, expected {len(requests)}"

    samples = engine.generate(requests, sampling)
    assert len(samples) == len(requests), f"got {len(samples)} samples, expected {len(requests)}"
    rollouts = [
        Rollout(
            token_ids=sample.token_ids,
            logprobs=sample.logprobs,
            text=decode(sample.token_ids.tolist()),
            finish_reason=sample.finish_reason,
            versions_T=sample.versions_T,
            routed_experts=sample.routed_experts,
        )
        for sample in samples
    ]
    return [
        Group(prompt=prompt, rollouts=tuple(rollouts[p * group_size : (p + 1) * group_size]))
        for p, prompt in enumerate(prompts)
    ]

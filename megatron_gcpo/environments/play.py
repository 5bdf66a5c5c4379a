"""From prompts to whole conversations: one engine call for each turn of all groups.

The result is ordinary groups. A conversation is one rollout whose completion holds the policy's turns with the user's
between them; ``trained_T`` tells them apart, and everything downstream (masks, log-probabilities, packing) follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_gcpo.environments.base import Environment
from megatron_gcpo.rollout.engine import RolloutEngine, Sample, SampleRequest, Sampling, check_fits
from megatron_gcpo.rollout.groups import generate_groups
from megatron_gcpo.seeds import derive_seed
from megatron_gcpo.types import Group, Prompt, Rollout

type Frame = Callable[[str], list[int]]
"""A user's text -> the token ids between the end of an answer and the beginning of the next one."""


def checked_frame(frame: Frame, environment: Environment | None, prompts: Sequence[Prompt]) -> Frame:
    """The frame, which has put a user's turn of this environment, if any.

    Raises ValueError where it cannot, before anything is drawn.
    """
    if environment is not None:
        frame(environment.reply(prompts[0], ("",), 0))
    return frame


def converse(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    environment: Environment | None,
    *,
    frame: Frame,
    group_size: int,
    max_new_tokens: int,
    sampling: Sampling,
    decode: Callable[[list[int]], str],
    run_seed: int,
    step: int,
    stream: str = "rollout",
) -> list[Group]:
    """Groups of ``group_size`` conversations for each prompt, in their order; of single answers without an environment.

    Raises:
        ValueError: as of ``generate_groups`` and ``play``.
    """
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "sampling": sampling,
        "decode": decode,
        "run_seed": run_seed,
        "step": step,
        "stream": stream,
    }
    groups = generate_groups(engine, prompts, group_size=group_size, **settings)
    return groups if environment is None else play(engine, groups, environment, frame=frame, **settings)


def play(
    engine: RolloutEngine,
    groups: Sequence[Group],
    environment: Environment,
    *,
    frame: Frame,
    max_new_tokens: int,
    sampling: Sampling,
    decode: Callable[[list[int]], str],
    run_seed: int,
    step: int,
    stream: str = "rollout",
) -> list[Group]:
    """The same groups after all turns. Seeds depend on the run, the step, the prompt, the sample and the turn alone.

    stream: what the first answers were drawn for (``generate_groups``).

    Raises:
        ValueError: a conversation exceeds the model's positions, or a user's turn its bound.
    """
    groups = [replace(group, rollouts=tuple(replace(r, turns=(r.text,)) for r in group.rollouts)) for group in groups]
    for turn in range(1, environment.num_turns):
        own = f"{stream}.turn{turn}"
        requests, between = [], []
        for group in groups:
            seed = derive_seed(run_seed, f"{own}.user", step, group.prompt.id)
            for i, rollout in enumerate(group.rollouts):
                assert rollout.turns is not None, "got a rollout without turns, expected those so far"
                ids = joint(rollout, frame(environment.reply(group.prompt, rollout.turns, seed)))
                if len(ids) > environment.max_reply_tokens:
                    raise ValueError(
                        f"a user's turn of the environment {environment.name} has {len(ids)} tokens with its frame, at most "
                        f"{environment.max_reply_tokens} are planned for: shorten it, or raise its max_reply_tokens"
                    )
                context = (*group.prompt.token_ids, *rollout.token_ids.tolist(), *ids)
                check_fits(
                    len(context), max_new_tokens, engine.max_positions, f"turn {turn + 1} of {group.prompt.id!r}"
                )
                between.append(ids)
                requests.append(
                    SampleRequest(
                        prompt_token_ids=context,
                        seed=derive_seed(run_seed, own, step, group.prompt.id, i),
                        max_new_tokens=max_new_tokens,
                    )
                )
        samples = iter(zip(between, engine.generate(requests, sampling), strict=True))
        groups = [
            replace(group, rollouts=tuple(_continued(r, *next(samples), decode) for r in group.rollouts))
            for group in groups
        ]
    return groups


def joint(rollout: Rollout, frame_ids: Sequence[int]) -> list[int]:
    """The frame without the token that ends an answer, where the answer already ended with it."""
    ended = rollout.finish_reason == "stop" and frame_ids[:1] == rollout.token_ids[-1:].tolist()
    return list(frame_ids[1:] if ended else frame_ids)


def _continued(rollout: Rollout, between: list[int], sample: Sample, decode: Callable[[list[int]], str]) -> Rollout:
    trained_T = np.ones(len(rollout.token_ids), dtype=bool) if rollout.trained_T is None else rollout.trained_T
    text = decode(sample.token_ids.tolist())
    count = len(between)
    assert rollout.turns is not None, "got a rollout without turns, expected those so far"
    return Rollout(
        token_ids=np.concatenate([rollout.token_ids, np.array(between, dtype=np.int64), sample.token_ids]),
        logprobs=np.concatenate([rollout.logprobs, np.zeros(count, dtype=np.float32), sample.logprobs]),
        text=text,
        finish_reason=sample.finish_reason,
        versions_T=np.concatenate([rollout.versions_T, np.repeat(sample.versions_T[:1], count), sample.versions_T]),
        trained_T=np.concatenate([trained_T, np.zeros(count, dtype=bool), np.ones(len(sample.token_ids), dtype=bool)]),
        turns=(*rollout.turns, text),
    )

"""The longest sequences of a run: what micro-batches, engines and positions must have room for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_gcpo.config.records import Config
from megatron_gcpo.data.judged import JudgedSampling
from megatron_gcpo.environments.base import longest_sequence
from megatron_gcpo.environments.forecast import FRAME_TOKENS
from megatron_gcpo.methods.base import Method, MethodOptions


@dataclass(frozen=True, kw_only=True)
class Longest:
    """A kind of sequence, and the most tokens that one can have."""

    what: str
    tokens: int
    made_of: str
    """The sum, by configuration field."""


def longest_sequences(
    method: Method, options: MethodOptions, config: Config, max_prompt_tokens: int | None = None
) -> Iterator[Longest]:
    """Every kind of sequence that an engine draws and the trainer learns from.

    max_prompt_tokens: of the longest prompt there is; None: data.max_prompt_tokens.
    """
    prompt = config.data.max_prompt_tokens if max_prompt_tokens is None else max_prompt_tokens
    new, environment, sampler = config.rollout.max_new_tokens, method.environment, options.sampler
    if environment is None:
        made_of = "data.max_prompt_tokens + rollout.max_new_tokens"
        yield Longest(what="one sequence", tokens=prompt + new, made_of=made_of)
    else:
        yield Longest(
            what=f"a conversation of {method.name}",
            tokens=longest_sequence(environment, prompt, new),
            made_of=f"the prompt, {environment.num_turns} turns of rollout.max_new_tokens, and "
            f"{environment.max_reply_tokens} between turns",
        )
    if isinstance(sampler, JudgedSampling):
        yield Longest(
            what="a question of method.sampler judged with its answer",
            tokens=(sampler.recent + 1) * prompt + FRAME_TOKENS + sampler.max_new_tokens,
            made_of=f"{sampler.recent + 1} problems of data.max_prompt_tokens, {FRAME_TOKENS} around them, and "
            "method.sampler.max_new_tokens",
        )

"""The tokens on which trainer and engine are compared: short completions of real prompts, drawn by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_gcpo.config.records import Config
from megatron_gcpo.contract.facts import token_facts
from megatron_gcpo.credit.tokens import demonstration_batch
from megatron_gcpo.leader import Leader
from megatron_gcpo.rollout.engine import SampleRequest
from megatron_gcpo.seeds import derive_seed
from megatron_gcpo.types import TokenBatch

PROMPTS = 4
SAMPLES = 2
NEW_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Rows of prompt and completion, with what the engine says of the completions' n tokens. Tensors only."""

    batch: TokenBatch
    drawn_n: torch.Tensor
    """[n] float32 as reported with the drawn tokens; NaN where the engine reported another number of them."""
    scored_n: torch.Tensor
    """[n] float32 as scored over the whole vocabulary at the rollout temperature."""
    special_ids: tuple[int, ...]
    """Ids that a tokenizer may put before a prompt."""

    @property
    def lengths_N(self) -> list[int]:
        """Completion tokens of each row."""
        return [int(self.batch.rows([n]).mask_T.sum()) for n in range(self.batch.num_rows)]


def draw_probe(leader: Leader, config: Config, replica: int, vocab_size: int) -> tuple[Probe | None, tuple[str, ...]]:
    """(the probe, what its tokens themselves show to be wrong); no probe when the model cannot compute its tokens."""
    rollout, prompts = config.rollout, leader.prompts.prompts
    count = min(PROMPTS, len(prompts))
    chosen = [prompts[(replica * count + p) % len(prompts)] for p in range(count)]
    requests = [
        SampleRequest(
            prompt_token_ids=tuple(prompt.token_ids),
            seed=derive_seed(config.run.seed, "contract", replica, prompt.id, sample),
            max_new_tokens=min(NEW_TOKENS, rollout.max_new_tokens),
        )
        for prompt in chosen
        for sample in range(SAMPLES)
    ]
    samples = leader.engine.generate(requests, leader.sampling)
    facts = token_facts(requests, samples, leader.sampling, vocab_size=vocab_size)
    pairs = [(r.prompt_token_ids, s.token_ids) for r, s in zip(requests, samples, strict=True)]
    if any(((ids < 0) | (ids >= vocab_size)).any() for pair in pairs for ids in map(np.asarray, pair)):
        return None, facts
    drawn = [
        s.logprobs if len(s.logprobs) == len(s.token_ids) else np.full(len(s.token_ids), np.nan, np.float32)
        for s in samples
    ]
    scored = leader.engine.score([(p, c.tolist()) for p, c in pairs], rollout.temperature)
    tokenizer = leader.tokenizer
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    probe = Probe(
        batch=demonstration_batch(pairs),
        drawn_n=torch.from_numpy(np.concatenate(drawn)),
        scored_n=torch.from_numpy(np.concatenate(scored)),
        special_ids=tuple(dict.fromkeys(i for i in special if i is not None and 0 <= i < vocab_size)),
    )
    return probe, facts


def with_first_token(batch: TokenBatch, token_id: int | None) -> TokenBatch:
    """The same completions after prompts that begin with one more token, or lack their first (None)."""
    pairs = []
    for row in (batch.rows([n]) for n in range(batch.num_rows)):
        cut = prompt_length(row)
        prompt, completion = row.tokens_T[:cut].tolist(), row.tokens_T[cut:].tolist()
        # the first completion token is predicted from something
        prompt = [token_id, *prompt] if token_id is not None else prompt[1:] or prompt
        pairs.append((prompt, completion))
    return demonstration_batch(pairs)


def prompt_length(row: TokenBatch) -> int:
    return int((row.mask_T == 0).sum())


def aligned(values_n: torch.Tensor, lengths: Sequence[int], shift: int) -> torch.Tensor:
    """[n] what the engine would have said of each token if it had reported that ``shift`` tokens later; NaN past the ends."""
    shifted = []
    for row_t in values_n.split(list(lengths)):
        moved_t = torch.full_like(row_t, torch.nan)
        if shift > 0:
            moved_t[:-shift] = row_t[shift:]
        else:
            moved_t[-shift:] = row_t[:shift]
        shifted.append(moved_t)
    return torch.cat(shifted)

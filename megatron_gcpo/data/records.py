"""What a source yields (Item or BadRow) and what becomes of it (PromptSet)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_gcpo.types import Prompt

type Messages = list[dict[str, str]]
"""A conversation: {"role": ..., "content": ...} each."""


class WrongRow(Exception):
    """Why a row is bad: the kind that is counted, and the reason in one line."""


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that cannot be used, and why."""

    where: str
    """File and line, e.g. "data/train.jsonl:12"."""
    kind: str
    """What is counted: "malformed", "missing column", "wrong type", "empty", "duplicate id", "too long", "template"."""
    reason: str
    """One readable line for the person who has to repair it."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A sound row, before template and tokenizer."""

    where: str
    """File and line."""
    id: str
    prompt: str | Messages
    answer: str
    extras: Mapping[str, Any] = field(default_factory=dict)
    demonstrations: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    """One per demonstration."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of one source, in the order of the source; the sampler speaks of them by index."""

    origin: str
    """The source in a few words, for messages."""
    prompts: tuple[Prompt, ...]
    demonstrations_P: tuple[tuple[str, ...], ...]
    """Worked solutions of each prompt: completions without template or end-of-sequence token. May be empty."""
    demonstration_weights_P: tuple[tuple[float, ...], ...]
    """How often each is shown relative to the others of its prompt."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Rows left out (``data.on_bad_row: skip``), counted by kind."""
    bad_rows: tuple[BadRow, ...] = ()
    """The first of them."""

    def __len__(self) -> int:
        return len(self.prompts)

    def demonstrations(self, prompt_index: int) -> tuple[str, ...]:
        """Completions that solve the prompt; empty when the source has none."""
        return self.demonstrations_P[prompt_index]

    def fingerprint(self) -> str:
        """Hex digest of ids, texts and answers in order, for a resumed run to see that its data is still the same.

        Not of tokens: chat templates may write today's date.
        """
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            digest.update(repr((prompt.id, prompt.text, prompt.answer)).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

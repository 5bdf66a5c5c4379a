"""The frozen sentence encoder of a run: each distinct text is encoded once and remembered by its content hash."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_gcpo.config.records import EmbedConfig
from megatron_gcpo.embed.sentence_model import SentenceModel


def content_hash(text: str) -> str:
    """32 hex digits of blake2b over the text: the cache's key, and what the rollout dump stores."""
    # surrogatepass: a byte-level tokenizer can decode a torn character
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True)
class _Entry:
    row_D: torch.Tensor
    truncated: bool


class Encoder:
    """Embeds texts with the model and limits of an EmbedConfig; loading it imports sentence-transformers.

    ``take_metrics`` says what was done since it was last called.
    """

    def __init__(self, config: EmbedConfig, device: torch.device) -> None:
        self._model = SentenceModel(config, device)
        self._capacity = config.cache_entries
        self._cache: OrderedDict[str, _Entry] = OrderedDict()
        self._reset_counts()

    @property
    def dim(self) -> int:
        """D, the length of an embedding."""
        return self._model.dim

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """[N, D] float32 on the CPU, unit rows, in the order of the texts.

        Raises:
            ValueError: the encoder gave NaN, infinity or a zero vector for a text.
        """
        keys = [content_hash(text) for text in texts]
        entries = {key: self._cache[key] for key in keys if key in self._cache}
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in entries}
        self._hits += len(entries)
        if new:
            # encoded outside the cache: what is wanted now may be more than the cache holds
            rows_ND, truncated = self._model.encode(list(new.values()))
            # cloned: a kept view would keep the whole batch alive
            entries |= {
                key: _Entry(row_D=row_D.clone(), truncated=cut)
                for key, row_D, cut in zip(new, rows_ND, truncated, strict=True)
            }
        self._encoded += len(new)
        self._distinct += len(entries)
        self._truncated += sum(entry.truncated for entry in entries.values())
        for key, entry in entries.items():
            self._cache[key] = entry
            self._cache.move_to_end(key)
        while len(self._cache) > self._capacity:
            self._cache.popitem(last=False)
        return torch.stack([entries[key].row_D for key in keys]) if keys else torch.zeros(0, self.dim)

    def forget(self) -> None:
        """Empty the cache; counts stay."""
        self._cache.clear()

    def _reset_counts(self) -> None:
        self._distinct = self._encoded = self._hits = self._truncated = 0

    def take_metrics(self) -> dict[str, float]:
        """Counts since the last call, which they forget.

        ``embed/texts`` distinct texts wanted, ``embed/encoded`` those that went through the model,
        ``embed/cache_hit_rate`` and ``embed/truncation_rate`` as shares of the distinct texts (0 when there were none).
        """
        distinct = max(self._distinct, 1)
        metrics = {
            "embed/texts": float(self._distinct),
            "embed/encoded": float(self._encoded),
            "embed/cache_hit_rate": self._hits / distinct,
            "embed/truncation_rate": self._truncated / distinct,
        }
        self._reset_counts()
        return metrics

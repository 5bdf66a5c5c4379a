"""Embeddings kept in a file, for tools that look at the same texts again and again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from megatron_gcpo.config.records import EmbedConfig
from megatron_gcpo.embed.encoder import Encoder, content_hash


class KeptEncoder:
    """An encoder whose rows survive in ``folder``; the model is loaded only for texts that are new."""

    def __init__(self, config: EmbedConfig, folder: Path) -> None:
        self._config = config
        self._path = folder / f"embeddings_{config.encoder.replace('/', '_')}_{config.dtype}.npz"
        self._rows: dict[str, np.ndarray] = {}
        if self._path.is_file():
            with np.load(self._path) as stored:
                self._rows = dict(zip(stored["keys"].tolist(), stored["rows"], strict=True))
        self.num_encoded = 0
        """Texts that went through the model."""

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """[N, D] float32 unit rows, in the order of the texts; see Encoder.encode for errors."""
        keys = [content_hash(text) for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._rows}
        if new:
            encoder = Encoder(self._config.model_copy(update={"cache_entries": 0}), torch.device("cpu"))
            self._rows.update(zip(new, encoder.encode(list(new.values())).numpy(), strict=True))
            self.num_encoded += len(new)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._path.with_suffix(".tmp.npz")
            np.savez(unfinished, keys=np.array(list(self._rows)), rows=np.stack(list(self._rows.values())))
            unfinished.replace(self._path)
        return torch.from_numpy(np.stack([self._rows[key] for key in keys])) if keys else torch.zeros(0, 0)

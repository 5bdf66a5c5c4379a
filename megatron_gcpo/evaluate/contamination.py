"""Were the evaluation's problems trained on? Overlap of word n-grams with the training prompts (13, as in arXiv 2005.14165)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NGRAM = 13
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """One evaluation problem that shares text with the training prompts."""

    prompt_id: str
    share: float
    """Of its n-grams, those that occur in some training prompt, in (0, 1]."""
    example: str
    """The first shared n-gram."""


def find_overlaps(problems: Iterable[tuple[str, str]], training: Iterable[str], *, ngram: int = NGRAM) -> list[Overlap]:
    """Problems with at least one n-gram of the training prompts, worst first.

    Args:
        problems: (id, text) of the evaluation.
        training: texts of the training prompts.
        ngram: words of an n-gram, without case and punctuation. A text with fewer words is one n-gram, as it is.
    """
    problems = list(problems)
    # Of the two sides the evaluation is the small one: only its n-grams are held.
    wanted: dict[str, set[tuple[str, ...]]] = {name: set(_ngrams(text, ngram)) for name, text in problems}
    by_gram: dict[tuple[str, ...], None] = dict.fromkeys(gram for grams in wanted.values() for gram in grams)
    seen = {gram for text in training for gram in _ngrams(text, ngram) if gram in by_gram}
    overlaps = []
    for name, text in problems:
        shared = wanted[name] & seen
        if shared:
            first = next(gram for gram in _ngrams(text, ngram) if gram in shared)
            overlaps.append(Overlap(prompt_id=name, share=len(shared) / len(wanted[name]), example=" ".join(first)))
    return sorted(overlaps, key=lambda overlap: (-overlap.share, overlap.prompt_id))


def _ngrams(text: str, ngram: int) -> Sequence[tuple[str, ...]]:
    words = _WORD.findall(text.casefold())
    if not words:
        return []
    return [tuple(words[i : i + ngram]) for i in range(max(1, len(words) - ngram + 1))]

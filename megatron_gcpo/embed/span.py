"""Which part of a completion is embedded.

Two correct solutions share their final answer by definition. Left in, it pulls all embeddings of a group together and
says nothing about how they differ; ``reasoning`` strips it.
"""

from __future__ import annotations

import re
from typing import Literal

TAIL_CHARS = 2000
"""Answers are looked for this close to the end: completions are hostile input, and the patterns are not linear."""

_LEAD = r"(?:(?:so|thus|hence|therefore|and so|in conclusion)\s*,?\s*)?"
_ANSWER_SENTENCE = re.compile(
    # "The answer is 42.", "Final answer: 42", "**Answer:** 42", only as the last sentence of the text
    rf"(?:^|(?<=[\n.!?;>]))[*_#>\s]*{_LEAD}(?:(?:the|my|our)\s+)?(?:(?:final|correct)\s+)?answer[*_\s]*"
    r"(?:is|:|=|was|would be|must be)(?:[^\n.!?]|[.!?](?=\S))*[.!?*_\s]*$",
    re.IGNORECASE,
)
_ANSWER_NUMBER = re.compile(r"(?:^|(?<=\s))answer[\s:=]+[\d\s()+*/=.,-]*$", re.IGNORECASE)
"""How the packaged tasks end: "... . answer 7 2"."""
_HASHES = re.compile(r"(?:^|\n)[ \t]*####[^\n]*\s*$")
_ANSWER_TAG = re.compile(r"<answer>(?:(?!</?answer>).)*(?:</answer>)?\s*$", re.IGNORECASE | re.DOTALL)
_EMPTY_MATH = re.compile(r"\$\$[ \t]*\$\$|\\\[[ \t]*\\\]|\\\([ \t]*\\\)|\$[ \t]*\$")
_NUMBER = re.compile(r"\d+(?:[ .,]\d+)*")
"""Also one that is spelt digit by digit, or with separators."""
_TAG = re.compile(r"<[^<>\s]{1,30}>")


type Span = Literal["completion", "reasoning", "wording"]


def embedded_span(text: str, span: Span) -> str:
    """The text to embed of a completion; never blank unless the completion is.

    ``completion`` is all of it. ``reasoning`` is all of it, thinking included, less the final answer in the forms it
    usually has at the end: the last \\boxed{...} with a sentence that only announced it, "The answer is ...",
    "Final answer: ...", "#### ...", <answer>...</answer>, and the closing "answer 7 2" of the packaged tasks. A
    completion that is nothing but an answer is embedded whole. ``wording`` is the reasoning with every number replaced
    by one mark: how it was solved, without the numbers of this problem.
    """
    if span == "completion":
        return text
    reasoning = _without_last_box(text)
    for pattern in (_ANSWER_TAG, _HASHES, _ANSWER_SENTENCE, _ANSWER_NUMBER):
        found = pattern.search(reasoning, max(0, len(reasoning) - TAIL_CHARS))
        if found is not None:
            reasoning = reasoning[: found.start()]
    reasoning = reasoning.strip()
    if not re.search(r"\w", _TAG.sub("", reasoning)):
        reasoning = text
    return _NUMBER.sub("#", reasoning) if span == "wording" else reasoning


def _without_last_box(text: str) -> str:
    """Cut the last \\boxed{...} (braces balanced, or to the end if unfinished) and math signs left empty by it."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return text
    depth, end = 0, len(text)
    for i in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            end = i + 1
            break
    # only what touches the box: "$$" elsewhere opens or closes someone else's formula
    around = slice(max(0, start - 4), start + 4)
    cut = text[:start] + text[end:]
    return cut[: around.start] + _EMPTY_MATH.sub("", cut[around], count=1) + cut[around.stop :]

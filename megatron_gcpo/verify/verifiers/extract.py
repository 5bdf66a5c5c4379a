"""Where in a completion the final answer is, and when two answers are the same text. Linear-time on hostile text."""

from __future__ import annotations

import re
import unicodedata

_BOXED = ("\\boxed{", "\\fbox{")
_TAG_END = "</answer>"
_TAG_START = "<answer>"
_SAID = re.compile(r"(?:final answer|answer)[ \t]*(?:is|:|=)?[ \t]*:?[ \t]*(\S[^\n]*)", re.IGNORECASE)
_MAX_PHRASE_CHARACTERS = 4000


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} (or \fbox) whose braces close, else None."""
    start = max(text.rfind(opening) for opening in _BOXED)
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth, i = 1, begin
    while i < len(text):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin:i]
        i += 2 if text[i] == "\\" else 1  # an escaped brace does not count
    return None


def last_tagged(text: str) -> str | None:
    """The content of the last <answer>...</answer>, else None."""
    end = text.rfind(_TAG_END)
    start = text.rfind(_TAG_START, 0, end) if end >= 0 else -1
    return text[start + len(_TAG_START) : end].strip() if start >= 0 else None


def last_phrase(text: str) -> str | None:
    """What follows the last "answer is", "answer:" or "final answer" to the end of its line, else None."""
    found = list(_SAID.finditer(text[-_MAX_PHRASE_CHARACTERS:]))
    return found[-1].group(1).strip() if found else None


def final_answer(text: str) -> str | None:
    """The answer a completion ends on: tagged, boxed, or announced in words, in this order; None if there is none."""
    for find in (last_tagged, last_boxed, last_phrase):
        answer = find(text)
        if answer:
            return answer
    return None


def by_pattern(pattern: str, text: str) -> str | None:
    """The last match of a regular expression: its first group if it has one, else all of it."""
    found = None
    for found in re.finditer(pattern, text, re.DOTALL):  # noqa: B007 - the last one is wanted
        pass
    if found is None:
        return None
    return (found.group(1) if found.re.groups else found.group(0)) or ""


def normalise(text: str) -> str:
    """Text as it is compared: NFKC, case folded, blanks collapsed, no surrounding punctuation, dollars or \\text{}."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", plain)
    plain = " ".join(plain.split()).strip(" $`*\"'").rstrip(".,;:!")
    # 1,234,567 is the number 1234567.
    return re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", plain).strip()

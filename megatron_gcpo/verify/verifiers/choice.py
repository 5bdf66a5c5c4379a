"""Multiple choice: which letter a completion settles on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_gcpo.verify.base import Sample, Verifier
from megatron_gcpo.verify.verifiers.extract import last_boxed, last_tagged

_MAX_TAIL_CHARACTERS = 4000
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Choice(Verifier):
    """1 when the chosen letter is the reference letter, else 0."""

    letters: str = "ABCDEFGHIJ"
    """The letters on offer."""

    def __post_init__(self) -> None:
        if not (
            self.letters.isascii() and self.letters.isalpha() and len(set(self.letters.upper())) == len(self.letters)
        ):
            raise ValueError(f"letters {self.letters!r}: write each letter on offer once, e.g. ABCD")

    def prepare(self, sample: Sample) -> None:
        if self._letter(sample.answer) is None:
            raise ValueError(
                f"verify.name=choice needs a letter of {self.letters} as the answer of every prompt, got "
                f"{sample.answer[:40]!r}: check data.train.answer_column or set verify.options.letters"
            )

    def judge(self, sample: Sample) -> float:
        return float(self.chosen(sample.completion) == self._letter(sample.answer))

    def chosen(self, text: str) -> str | None:
        """The letter in the last <answer> tag or box, else after the last "answer", else alone on the last line."""
        for marked in (last_tagged(text), last_boxed(text)):
            if marked is not None:
                return self._letter(marked)
        tail = text[-_MAX_TAIL_CHARACTERS:]
        said = re.findall(
            rf"(?i:answer|choice|option)\b[^\w\n(]{{0,8}}(?i:is\b)?[^\w\n(]{{0,8}}\(?([{self._class}])\b", tail
        )
        if said:
            return said[-1].upper()
        lines = tail.strip().splitlines()
        return self._letter(lines[-1]) if lines else None

    def _letter(self, text: str) -> str | None:
        """The letter when the text is one letter with decoration or "B) an explanation", else None."""
        plain = _TEXT.sub(r"\1", text).strip(" \t\n$*`'\"")
        found = re.match(rf"\(?([{self._class}])(?:$|[).:,*\s]\s*)", plain + " " if len(plain) == 1 else plain)
        if found is None:
            return None
        rest = plain[found.end() :]
        # "A cat" starts with a word, not with a choice: a bare letter must stand alone.
        if rest and not plain[found.end(1) : found.end(1) + 1].strip(" \t\n"):
            return None
        return found.group(1).upper()

    @property
    def _class(self) -> str:
        return self.letters.upper() + self.letters.lower()

r"""The layouts in which well-known benchmarks are published, as rows with a prompt and an answer.

A layout knows the columns of a file and nothing else: where the file comes from, how answers are judged and which
instruction the model gets are the user's. ``data.*.layout: gsm8k`` (or an entry of an evaluation suite) picks one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_gcpo.data.records import WrongRow
from megatron_gcpo.seeds import derive_seed, permutation
from megatron_gcpo.verify.verifiers.extract import last_boxed

LETTERS = "ABCDEFGHIJ"
type Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way of publishing problems."""

    convert: Callable[[Row], dict[str, Any]]
    """A row -> its ``prompt`` (text) and ``answer`` (text); other columns travel along by themselves."""
    verifier: str
    """The row of verify.VERIFIERS that fits the answers."""


def _gsm8k(row: Row) -> dict[str, Any]:
    """question; answer = worked solution, then "#### 1,234"."""
    solution = _text(row, "answer")
    if "####" not in solution:
        raise WrongRow("wrong type", "column 'answer' has no '####' before the final number, as GSM8K writes it")
    answer = solution.rsplit("####", 1)[1].strip().replace(",", "")
    return {"prompt": _text(row, "question"), "answer": answer, "solution": solution}


def _problem(row: Row) -> dict[str, Any]:
    """problem and answer (MATH-500, AIME, AMC); names of columns in any case."""
    lower = {key.lower(): key for key in row}
    return {"prompt": _text(row, lower.get("problem", "problem")), "answer": _text(row, lower.get("answer", "answer"))}


def _minerva(row: Row) -> dict[str, Any]:
    r"""problem; solution, whose last \boxed{} is the answer."""
    answer = last_boxed(_text(row, "solution"))
    if answer is None:
        raise WrongRow("wrong type", r"column 'solution' has no \boxed{...} to take the answer from")
    return {"prompt": _text(row, "problem"), "answer": answer}


def _olympiad_bench(row: Row) -> dict[str, Any]:
    """question; final_answer = list of texts; unit; several answers are joined by commas, as a set."""
    answers = row.get("final_answer")
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(answers, Sequence) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise WrongRow("wrong type", "column 'final_answer' is no list of texts: proofs have none, leave them out")
    return {"prompt": _text(row, "question"), "answer": ", ".join(a.strip().strip("$") for a in answers)}


def _arc(row: Row) -> dict[str, Any]:
    """question; choices = {text: [...], label: [...]}; answerKey a label ("A" or "1")."""
    choices = row.get("choices")
    if not isinstance(choices, Mapping) or len(choices.get("text", ())) != len(choices.get("label", ())):
        raise WrongRow("wrong type", "column 'choices' is not {text: [...], label: [...]} of equal lengths")
    labels, key = list(choices["label"]), _text(row, "answerKey")
    if key not in labels:
        raise WrongRow("wrong type", f"column 'answerKey' is {key!r}, which is none of the labels {labels}")
    return _choice(_text(row, "question"), list(choices["text"]), labels.index(key))


def _gpqa(row: Row) -> dict[str, Any]:
    """Question; Correct Answer; Incorrect Answer 1-3. Options are shuffled by the question itself, alike in every run."""
    question = _text(row, "Question")
    options = [_text(row, "Correct Answer"), *(_text(row, f"Incorrect Answer {n}") for n in (1, 2, 3))]
    order = permutation(len(options), derive_seed(0, "gpqa", prompt_id=question)).tolist()
    return _choice(question, [options[i] for i in order], order.index(0))


def _mmlu_pro(row: Row) -> dict[str, Any]:
    """question; options = list of up to ten texts; answer_index, or answer = letter."""
    options = row.get("options")
    if not isinstance(options, Sequence) or isinstance(options, str) or not 2 <= len(options) <= len(LETTERS):
        raise WrongRow("wrong type", f"column 'options' is no list of 2 to {len(LETTERS)} texts")
    index = row.get("answer_index")
    if index is None:
        index = LETTERS.find(_text(row, "answer").upper())
    if not isinstance(index, int) or not 0 <= index < len(options):
        raise WrongRow(
            "wrong type", f"the answer is option {index!r} of {len(options)}: correct answer_index or answer"
        )
    return _choice(_text(row, "question"), [str(option) for option in options], index)


LAYOUTS: Mapping[str, Layout] = {
    "gsm8k": Layout(convert=_gsm8k, verifier="math"),
    "math500": Layout(convert=_problem, verifier="math"),
    "aime": Layout(convert=_problem, verifier="math"),
    "amc": Layout(convert=_problem, verifier="math"),
    "minerva": Layout(convert=_minerva, verifier="math"),
    "olympiad_bench": Layout(convert=_olympiad_bench, verifier="math"),
    "arc": Layout(convert=_arc, verifier="choice"),
    "gpqa": Layout(convert=_gpqa, verifier="choice"),
    "mmlu_pro": Layout(convert=_mmlu_pro, verifier="choice"),
}


def _choice(question: str, options: Sequence[str], correct: int) -> dict[str, Any]:
    listed = "\n".join(f"{LETTERS[i]}) {option.strip()}" for i, option in enumerate(options))
    return {"prompt": f"{question}\n\n{listed}", "answer": LETTERS[correct]}


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if column not in row:
        raise WrongRow("missing column", f"no column {column!r}, which this layout has; it has {', '.join(row)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = re.sub(r"\.0$", "", str(value))  # answers such as 33.0 are whole numbers that a table made floats
    if not isinstance(value, str) or not value.strip():
        raise WrongRow("empty" if value in (None, "") else "wrong type", f"column {column!r} holds no text")
    return value.strip()

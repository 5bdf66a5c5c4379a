"""Rows written as the well-known benchmarks publish them, and rows that only look like it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from megatron_gcpo.config.records import SourceConfig
from megatron_gcpo.data.benchmarks import LAYOUTS
from megatron_gcpo.data.readers import read_jsonl, read_parquet
from megatron_gcpo.data.records import BadRow, Item

ROWS = {
    "gsm8k": (
        {"question": "2 bags of 600?", "answer": "2*600=<<2*600=1200>>1200\n#### 1,200"},
        "2 bags of 600?",
        "1200",
    ),
    "math500": (
        {"problem": "x?", "solution": r"\boxed{3}", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 2},
        "x?",
        r"\frac{1}{2}",
    ),
    "aime": ({"ID": "2024-I-1", "Problem": "n?", "Answer": 33}, "n?", "33"),
    "amc": ({"id": 0, "problem": "m?", "answer": 27.0, "url": "u"}, "m?", "27"),
    "minerva": ({"problem": "p?", "solution": r"so \boxed{4.5e33} it is", "type": "physics"}, "p?", "4.5e33"),
    "olympiad_bench": ({"question": "q?", "final_answer": ["$2$", "-2"], "unit": None}, "q?", "2, -2"),
    "arc": (
        {
            "id": "M1",
            "question": "Why?",
            "choices": {"text": ["a cat", "a dog"], "label": ["1", "2"]},
            "answerKey": "2",
        },
        "Why?\n\nA) a cat\nB) a dog",
        "B",
    ),
    "mmlu_pro": (
        {"question": "Which?", "options": ["x", "y", "z"], "answer": "C", "answer_index": 2, "category": "law"},
        "Which?\n\nA) x\nB) y\nC) z",
        "C",
    ),
}
GPQA = {
    "Question": "Deep?",
    "Correct Answer": "yes ",
    "Incorrect Answer 1": "no",
    "Incorrect Answer 2": "maybe",
    "Incorrect Answer 3": "42",
}


def read(tmp_path: Path, layout: str, *rows: dict) -> list[Item | BadRow]:
    path = tmp_path / f"{layout}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig.model_validate({"kind": "jsonl", "path": str(path), "layout": layout})
    return list(read_jsonl(source))


def test_every_layout_can_be_configured_and_is_tested() -> None:
    annotation = SourceConfig.model_fields["layout"].annotation
    assert set(get_args(get_args(annotation)[0])) == set(LAYOUTS) == {*ROWS, "gpqa"}


@pytest.mark.parametrize("layout", ROWS)
def test_prompt_and_answer(tmp_path: Path, layout: str) -> None:
    row, prompt, answer = ROWS[layout]
    [item] = read(tmp_path, layout, row)
    assert isinstance(item, Item)
    assert (item.prompt, item.answer) == (prompt, answer)
    kept = {key: value for key, value in row.items() if key not in ("prompt", "answer", "question", "problem")}
    assert kept.items() <= item.extras.items(), "other columns travel along"


def test_gpqa_shuffles_by_the_question_alone(tmp_path: Path) -> None:
    questions = [GPQA | {"Question": f"Deep {n}?"} for n in range(40)]
    items = read(tmp_path, "gpqa", *questions)
    again = read(tmp_path, "gpqa", *reversed(questions))[::-1]
    answers = []
    for item, same in zip(items, again, strict=True):
        assert isinstance(item, Item)
        assert isinstance(same, Item)
        assert (item.prompt, item.answer) == (same.prompt, same.answer)
        options = dict(line.split(") ") for line in str(item.prompt).split("\n\n")[1].splitlines())
        assert options[item.answer] == "yes"
        assert sorted(options.values()) == ["42", "maybe", "no", "yes"]
        answers.append(item.answer)
    assert set(answers) == set("ABCD"), "the correct option must not keep its place"


WRONG = {
    "gsm8k": ({"question": "?", "answer": "12"}, "has no '####'"),
    "math500": ({"question": "?", "answer": "12"}, "no column 'problem'"),
    "aime": ({"Problem": "?", "Answer": None}, "column 'Answer' holds no text"),
    "minerva": ({"problem": "?", "solution": "none"}, "no \\boxed"),
    "olympiad_bench": ({"question": "?", "final_answer": None}, "no list of texts"),
    "arc": ({"question": "?", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "B"}, "none of the labels"),
    "gpqa": ({"Question": "?", "Correct Answer": "a"}, "no column 'Incorrect Answer 1'"),
    "mmlu_pro": ({"question": "?", "options": ["a", "b"], "answer_index": 2}, "option 2 of 2"),
}


@pytest.mark.parametrize("layout", WRONG)
def test_a_row_of_another_shape_is_a_bad_row_with_its_reason(tmp_path: Path, layout: str) -> None:
    row, reason = WRONG[layout]
    [bad] = read(tmp_path, layout, row)
    assert isinstance(bad, BadRow)
    assert reason in bad.reason
    assert bad.where.endswith(f"{layout}.jsonl:1")


def test_parquet_without_the_default_columns_is_read_by_its_layout(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([ROWS["arc"][0]]), path)
    [item] = read_parquet(SourceConfig(kind="parquet", path=str(path), layout="arc", id_column="id"))
    assert isinstance(item, Item)
    assert (item.id, item.answer) == ("M1", "B")

"""From one row of a file or data set to an Item: which column means what, and every way a row can be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_gcpo.data.benchmarks import LAYOUTS
from megatron_gcpo.data.records import BadRow, Item, Messages, WrongRow
from megatron_gcpo.names import nearest

if TYPE_CHECKING:
    from megatron_gcpo.config.records import SourceConfig


def read_row(row: Mapping[str, Any], where: str, default_id: str, source: SourceConfig) -> Item | BadRow:
    """The item of a row. A dotted column name ("reward_model.ground_truth") reaches into nested objects.

    Columns that the source does not name travel along as ``extras``. A ``layout`` first makes prompt and answer of the
    columns that it knows.
    """
    try:
        if source.layout is not None:
            row = {**row, **LAYOUTS[source.layout].convert(row)}
        prompt = _prompt(_column(row, "prompt_column", source.prompt_column), source.prompt_column)
        answer = _scalar(_column(row, "answer_column", source.answer_column), source.answer_column)
        item_id, demonstrations = default_id, ()
        if source.id_column is not None:
            item_id = _scalar(_column(row, "id_column", source.id_column), source.id_column)
        if source.demonstration_column is not None:
            column = source.demonstration_column
            demonstrations = _demonstrations(_column(row, "demonstration_column", column), column)
    except WrongRow as wrong:
        kind, reason = wrong.args
        return BadRow(where=where, kind=kind, reason=reason)
    named = {source.prompt_column, source.answer_column, source.id_column, source.demonstration_column}
    return Item(
        where=where,
        id=item_id,
        prompt=prompt,
        answer=answer,
        extras={key: value for key, value in row.items() if key not in named},
        demonstrations=demonstrations,
        weights=(1.0,) * len(demonstrations),
    )


def missing_column(columns: list[str], field: str, column: str) -> str | None:
    """Why ``column`` cannot be found among the top-level names, with the nearest one; None when it can."""
    if column in columns or column.split(".")[0] in columns:
        return None
    near = nearest(column, columns, cutoff=0.5)
    hint = f"the nearest, {near!r}" if near is not None else f"one of {', '.join(columns[:20])}"
    return f"no column {column!r}: {f'set {field} to {hint}' if columns else 'the row is an empty object'}"


def _column(row: Mapping[str, Any], field: str, column: str) -> Any:
    if column in row:
        return row[column]
    if reason := missing_column(list(row), field, column):
        raise WrongRow("missing column", reason)
    value: Any = row
    for part in column.split("."):
        if not (isinstance(value, Mapping) and part in value):
            raise WrongRow("missing column", f"no {part!r} inside column {column!r}: correct {field}")
        value = value[part]
    return value


def _scalar(value: Any, column: str) -> str:
    if value is None:
        raise WrongRow("empty", f"column {column!r} is empty")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise WrongRow("wrong type", f"column {column!r} holds {_kind(value)}, expected text or a number")
    text = str(value).strip()
    if not text:
        raise WrongRow("empty", f"column {column!r} is empty")
    return text


def _prompt(value: Any, column: str) -> str | Messages:
    if isinstance(value, list):
        return _messages(value, column)
    return _text(value, column)


def _text(value: Any, column: str) -> str:
    if value is not None and not isinstance(value, str):
        raise WrongRow("wrong type", f"column {column!r} holds {_kind(value)}, expected text")
    if value is None or not value.strip():
        raise WrongRow("empty", f"column {column!r} is empty")
    return value


def _messages(value: list[Any], column: str) -> Messages:
    for message in value:
        sound = isinstance(message, Mapping) and all(isinstance(message.get(k), str) for k in ("role", "content"))
        if not sound:
            raise WrongRow("wrong type", f"column {column!r} holds a list of something else than {{role, content}}")
    if not value or not value[-1]["content"].strip():
        raise WrongRow("empty", f"column {column!r} has no message to answer")
    if value[-1]["role"] == "assistant":
        raise WrongRow("wrong type", f"column {column!r} ends with the assistant's answer, expected a question")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _demonstrations(value: Any, column: str) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    if not texts:
        raise WrongRow("empty", f"column {column!r} is an empty list")
    return tuple(_text(text, column) for text in texts)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")

"""What pydantic found wrong with a record, in one readable line with the nearest valid name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from megatron_gcpo.names import nearest


def load_record[R: BaseModel](path: str | Path, record: type[R], what: str, content: str) -> R:
    """The record in a YAML file. what, content: name the file and what it holds in errors.

    Raises:
        ValueError: no such file, no YAML, or one line for each field that is wrong.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{what} {path} is not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{what} {path} must hold a mapping with {content}")
    try:
        return record.model_validate(values)
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {explain(record, e)}" for e in error.errors())) from None


def explain(record: type[BaseModel], error: Any, *, section: tuple[str, ...] = ()) -> str:
    """One line for one of ``ValidationError.errors()`` of a record; ``section``: where the record is within its file."""
    where = ".".join((*section, *(str(part) for part, _, written in _walk(record, error["loc"]) if written)))
    match error["type"]:
        case "extra_forbidden":
            parents = [record, *(parent for _, parent, _ in _walk(record, error["loc"][:-1]))]
            above, _, name = where.rpartition(".")
            known = list(parents[-1].model_fields)
            return f"{where} is not a field{or_nearest(name, known, f'{above}.' if above else '')}"
        case "missing":
            return f"{where} is missing: set it"
        case "model_type" | "dict_type":
            return f"{where} must be a section with fields of its own (got {error['input']!r})"
        case "union_tag_invalid":
            known = error["ctx"]["expected_tags"].replace("'", "").split(", ")
            return f"{where}.name {error['ctx']['tag']!r} is unknown{or_nearest(error['ctx']['tag'], known)}"
        case "union_tag_not_found":
            return f"{where} has no name: write a name, or name: and its options (got {error['input']!r})"
    message = error["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(error["input"], Mapping) else f" (got {error['input']!r})"
    said = f"{message[0].lower()}{message[1:]}{shown}"
    return f"{where}: {said}" if where else said  # a rule between fields has no place of its own


def or_nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """ "; did you mean X?", else what is known, else nothing."""
    known = sorted(known)
    near = nearest(name, known)
    if near is not None:
        return f"; did you mean {prefix}{near}?"
    return f"; known here: {', '.join(known)}" if known else ""


def _walk(record: type[BaseModel], path: Sequence[Any]) -> Iterator[tuple[Any, type[BaseModel], bool]]:
    """(part, record it leads into, whether a user wrote it) along a path of pydantic's; tags of unions are not written."""
    union: list[type[BaseModel]] = []
    for part in path:
        chosen = [kind for kind in union if kind.model_fields["name"].default == part]
        if chosen:
            record, union = chosen[0], []
            yield part, record, False
            continue
        if part in record.model_fields:
            kinds = list(_records(record.model_fields[part].annotation))
            record, union = (kinds[0], []) if len(kinds) == 1 else (record, kinds)
        yield part, record, True


def _records(annotation: Any) -> Iterator[type[BaseModel]]:
    """The records that a field's type can be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _records(inner)

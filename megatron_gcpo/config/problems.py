"""What pydantic found wrong with a record, in one readable line with the nearest valid name."""

from __future__ import annotations

from collections.abc import Sequence
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


def explain(record: type[BaseModel], error: Any) -> str:
    """One line for one of ``ValidationError.errors()`` of a record."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        parent = _record_at(record, error["loc"][:-1])
        known = list(parent.model_fields) if parent else []
        prefix = "".join(f"{part}." for part in error["loc"][:-1])
        return f"{where} is not a field{or_nearest(str(error['loc'][-1]), known, prefix)}"
    if error["type"] == "missing":
        return f"{where} is missing: set it"
    if error["type"] in ("model_type", "dict_type"):
        return f"{where} must be a section with fields of its own (got {error['input']!r})"
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]} (got {error['input']!r})"


def or_nearest(name: str, known: Sequence[str], prefix: str = "") -> str:
    """ "; did you mean X?", else what is known, else nothing."""
    near = nearest(name, known)
    if near is not None:
        return f"; did you mean {prefix}{near}?"
    return f"; known here: {', '.join(sorted(known))}" if known else ""


def _record_at(record: type[BaseModel], loc: Sequence[Any]) -> type[BaseModel] | None:
    for part in loc:
        if isinstance(part, int):  # a list of records: its field led to them already
            continue
        field = record.model_fields.get(str(part))
        kinds = [field.annotation, *get_args(field.annotation)] if field else []
        nested = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if not nested:
            return None
        record = nested[0]
    return record

"""From the ``method`` section of a configuration to a method and its options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from megatron_gcpo.methods import dapo, dr_grpo, gcpo, grpo, rloo
from megatron_gcpo.methods.base import Method, MethodOptions

METHODS: Mapping[str, Method] = {
    method.name: method for method in (gcpo.METHOD, grpo.METHOD, dapo.METHOD, dr_grpo.METHOD, rloo.METHOD)
}


def resolve(method_section: Mapping[str, Any]) -> tuple[Method, MethodOptions]:
    """The method that ``name`` picks and the record of the section's other keys.

    Errors: ValueError, one line for all problems, naming each field, what is wrong and the nearest valid name.
    """
    if "name" not in method_section:
        raise ValueError(f"method.name is missing: set it to one of {', '.join(sorted(METHODS))}")
    name = method_section["name"]
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"method.name {name!r} is unknown{_nearest(str(name), METHODS)}")
    method = METHODS[name]
    try:
        options = method.options.model_validate({key: value for key, value in method_section.items() if key != "name"})
    except ValidationError as error:
        raise ValueError("; ".join(_explain(method.options, problem) for problem in error.errors())) from None
    return method, options


def _explain(options: type[BaseModel], problem: Any) -> str:
    where = ".".join(("method", *map(str, problem["loc"])))
    if problem["type"] == "extra_forbidden":
        return f"{where} is not an option{_nearest(str(problem['loc'][-1]), _fields_at(options, problem['loc'][:-1]))}"
    if problem["type"] == "missing":
        return f"{where} is missing: set it"
    message = str(problem["msg"]).removeprefix("Value error, ")
    shown = "" if isinstance(problem["input"], Mapping) else f" (got {problem['input']!r})"
    return f"{where}: {message[0].lower()}{message[1:]}{shown}"


def _fields_at(options: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """Names of the fields of the record that the path leads to."""
    for part in path:
        annotation = options.model_fields[part].annotation
        kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
        options = next(kind for kind in kinds if issubclass(kind, BaseModel))
    return list(options.model_fields)


def _nearest(name: str, known: Iterable[str]) -> str:
    valid = sorted(known)
    close = get_close_matches(name, valid, n=1, cutoff=0.5)
    guess = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{guess} Valid: {', '.join(valid)}"

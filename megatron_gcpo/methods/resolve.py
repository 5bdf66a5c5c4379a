"""From the ``method`` section of a configuration to a method and its options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from megatron_gcpo.methods import (
    bet,
    cispo,
    clip_cov,
    conspo,
    cw_grpo,
    dapo,
    darling,
    dqo,
    dr_grpo,
    dra_grpo,
    ed_grpo,
    ed_idpo,
    entropy_bonus,
    fg_expo,
    gcpo,
    gcpo_gold,
    gmpo,
    grpo,
    gspo,
    holderpo,
    kl_cov,
    lead,
    marginal,
    opefo,
    papo,
    passk,
    pkpo,
    recrit,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    rspo,
    sapo,
    stepcode,
    unlikeliness,
    vigor,
)
from megatron_gcpo.methods.base import Method, MethodOptions
from megatron_gcpo.methods.composition import check_options

FAMILIES: Mapping[str, Sequence[Method]] = {
    "baselines": (grpo.METHOD, dapo.METHOD, dr_grpo.METHOD, rloo.METHOD),
    "group and set credit": (
        gcpo.METHOD,
        marginal.METHOD,
        gcpo_gold.METHOD,
        passk.METHOD,
        pkpo.METHOD,
        darling.METHOD,
        dqo.METHOD,
        dra_grpo.METHOD,
        unlikeliness.METHOD,
    ),
    "ratio, loss and normalization": (
        reinforce_pp.METHOD,
        reinforce_pp_baseline.METHOD,
        gspo.METHOD,
        cispo.METHOD,
        gmpo.METHOD,
        holderpo.METHOD,
        sapo.METHOD,
        conspo.METHOD,
        rspo.METHOD,
    ),
    "token credit and entropy": (
        cw_grpo.METHOD,
        opefo.METHOD,
        papo.METHOD,
        clip_cov.METHOD,
        kl_cov.METHOD,
        entropy_bonus.METHOD,
    ),
    "controllers and samplers": (fg_expo.METHOD,),
    "rewards": (lead.METHOD, bet.METHOD, vigor.METHOD, recrit.METHOD, stepcode.METHOD),
    "exploration": (ed_grpo.METHOD, ed_idpo.METHOD),
}

METHODS: Mapping[str, Method] = {method.name: method for family in FAMILIES.values() for method in family}


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
    check_options(method, options)
    return method, options


def _explain(options: type[BaseModel], problem: Any) -> str:
    path = _readable(options, problem["loc"])
    where = ".".join(("method", *path))
    if problem["type"] == "extra_forbidden":
        return f"{where} is not an option{_nearest(str(problem['loc'][-1]), _fields_at(options, problem['loc'][:-1]))}"
    if problem["type"] == "missing":
        return f"{where} is missing: set it"
    if problem["type"] == "union_tag_invalid":
        context = problem["ctx"]
        return f"{where}.name {context['tag']!r} is unknown; Valid: {context['expected_tags'].replace(chr(39), '')}"
    if problem["type"] == "union_tag_not_found":
        return f"{where} has no name: write a name, or name: and its options (got {problem['input']!r})"
    message = str(problem["msg"]).removeprefix("Value error, ")
    shown = "" if isinstance(problem["input"], Mapping) else f" (got {problem['input']!r})"
    return f"{where}: {message[0].lower()}{message[1:]}{shown}"


def _walk(options: type[BaseModel], path: Sequence[Any]) -> Iterator[tuple[Any, type[BaseModel], bool]]:
    """(part, record it leads into, whether a user wrote it) along a path of pydantic's; tags of unions are not written."""
    union: list[type[BaseModel]] = []
    for part in path:
        chosen = [record for record in union if record.model_fields["name"].default == part]
        if chosen:
            options, union = chosen[0], []
            yield part, options, False
            continue
        if part in options.model_fields:
            records = list(_records(options.model_fields[part].annotation))
            options, union = (records[0], []) if len(records) == 1 else (options, records)
        yield part, options, True


def _records(annotation: Any) -> Iterator[type[BaseModel]]:
    """The records that a field's type can be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _records(inner)


def _readable(options: type[BaseModel], path: Sequence[Any]) -> list[str]:
    return [str(part) for part, _, written in _walk(options, path) if written]


def _fields_at(options: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """Names of the fields of the record that the path leads to."""
    records = [options, *(record for _, record, _ in _walk(options, path))]
    return list(records[-1].model_fields)


def _nearest(name: str, known: Iterable[str]) -> str:
    valid = sorted(known)
    close = get_close_matches(name, valid, n=1, cutoff=0.5)
    guess = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{guess} Valid: {', '.join(valid)}"

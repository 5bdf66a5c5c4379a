"""From the ``method`` section of a configuration to a method and its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from megatron_gcpo.config.problems import explain, or_nearest
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
    metis,
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
    "controllers and samplers": (fg_expo.METHOD, metis.METHOD),
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
        raise ValueError(f"method.name {name!r} is unknown{or_nearest(str(name), METHODS)}")
    method = METHODS[name]
    try:
        options = method.options.model_validate({key: value for key, value in method_section.items() if key != "name"})
    except ValidationError as error:
        problems = (explain(method.options, problem, section=("method",)) for problem in error.errors())
        raise ValueError("; ".join(problems)) from None
    check_options(method, options)
    return method, options

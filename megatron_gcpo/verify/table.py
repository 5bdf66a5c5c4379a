"""VERIFIERS: every verifier by name. Adding one is a file in verifiers/ and a row here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from megatron_gcpo.names import did_you_mean
from megatron_gcpo.verify.base import Verifier
from megatron_gcpo.verify.label import RewardLabel
from megatron_gcpo.verify.start import load


@dataclass(frozen=True, kw_only=True)
class Row:
    """Where a verifier lives and how it has to be run."""

    module: str
    """Module that defines it (or the path of a .py file); imported lazily."""
    attribute: str
    """Its class, a Verifier."""
    evaluates: bool
    """Code may run that the model wrote (eval, a big parser in C, ...): every sample gets a fresh process."""
    package: str | None = None
    """Import name of the package it needs."""
    install: str | None = None
    """How to get that package."""
    label: RewardLabel | None = None
    """What kind of reward it gives; tools/audit_rewards.py refuses a verifier without one."""


def _outcome(*exploits: str) -> RewardLabel:
    return RewardLabel(paradigm="rule", granularity="outcome", verifiable=True, exploits=exploits)


_HERE = "megatron_gcpo.verify.verifiers"
VERIFIERS: dict[str, Row] = {
    "exact": Row(
        module=f"{_HERE}.exact",
        attribute="Exact",
        evaluates=False,
        label=_outcome("right answers reached by wrong reasoning", "guessing where few answers are possible"),
    ),
    "choice": Row(
        module=f"{_HERE}.choice",
        attribute="Choice",
        evaluates=False,
        label=_outcome("guessing: 1 / number of letters", "always the letter that is right most often"),
    ),
    "task": Row(
        module=f"{_HERE}.task",
        attribute="PackagedTask",
        evaluates=False,
        label=_outcome(
            "right answers reached by wrong reasoning",
            "matrix_games: uniform play earns part of the reward of an equilibrium",
        ),
    ),
    "trace": Row(
        module=f"{_HERE}.trace",
        attribute="Trace",
        evaluates=True,
        label=RewardLabel(
            paradigm="rule",
            granularity="process",
            verifiable=True,
            exploits=(
                "values that are the same for many inputs",
                "programs that print what the question already shows",
            ),
        ),
    ),
    "math": Row(
        module=f"{_HERE}.math",
        attribute="Math",
        evaluates=True,
        package="math_verify",
        install="pip install math-verify",
        label=_outcome(
            "right answers reached by wrong reasoning",
            "guessing small whole numbers",
            "restating an unsimplified question",
        ),
    ),
    "reasoning_gym": Row(
        module=f"{_HERE}.reasoning_gym",
        attribute="ReasoningGym",
        evaluates=True,
        package="reasoning_gym",
        install="pip install 'megatron-gcpo[data]'",
        label=_outcome("guessing where few answers are possible", "partial_credit: .01 to .05 for any answer at all"),
    ),
}


def find(name: str, table: Mapping[str, Row] = VERIFIERS) -> Row:
    """The row of this name.

    Raises:
        ValueError: unknown name (the nearest one is given), or its package is not installed.
    """
    if name not in table:
        raise ValueError(
            f"verify.name: there is no verifier {name!r}: use one of {', '.join(table)}.{did_you_mean(name, table)}"
        )
    row = table[name]
    if row.package is not None and importlib.util.find_spec(row.package) is None:
        raise ValueError(f"verify.name={name} needs the Python package {row.package}, which is missing: {row.install}")
    return row


def create(name: str, options: Mapping[str, Any], table: Mapping[str, Row] = VERIFIERS) -> Verifier:
    """The verifier of this name with these options (the fields of its class).

    Raises:
        ValueError: unknown name or option (the nearest one is given), an option of the wrong type or value, or a
            missing package.
    """
    row = find(name, table)
    kind = load(row.module, row.attribute)
    known = {f.name: f for f in fields(kind)}
    for key, value in options.items():
        if key not in known:
            takes = f"use one of {', '.join(known)}" if known else "it has none"
            raise ValueError(
                f"verify.options: verifier {name} has no option {key!r}: {takes}.{did_you_mean(key, known)}"
            )
        if not _fits(value, known[key]):
            raise ValueError(f"verify.options.{key} is {value!r}, expected {known[key].type}")
    try:
        return kind(**options)
    except ValueError as error:
        raise ValueError(f"verify.options of {name}: {error}") from None


def _fits(value: Any, field: Field[Any]) -> bool:
    """Options are str, bool, int, float or one of these or None; values come from YAML."""
    allowed = {name.strip() for name in str(field.type).split("|")}
    given = type(value).__name__ if value is not None else "None"
    return given in allowed or (given == "int" and "float" in allowed)

"""Predicted values of a traced program: the program runs in the sandbox, the prediction is only compared."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from megatron_gcpo.data.trace import RETURN, check_call, instrument, run
from megatron_gcpo.verify.base import Sample, Verifier
from megatron_gcpo.verify.verifiers.extract import last_boxed

_MAX_CHARACTERS = 4000


@dataclass(frozen=True, kw_only=True)
class Trace(Verifier):
    """1 when the boxed value is what the call returns; with Prompt.extras["step"], when the completion is the value of that
    trace point, counted from 0. Prompt.extras["code"] and ["call"] are the program, without trace points, and the call."""

    def prepare(self, sample: Sample) -> None:
        for name in ("code", "call"):
            if not isinstance(sample.extras.get(name), str):
                raise ValueError(
                    f"verify.name=trace needs prompts with a column {name}: make them with tools/trace_code.py"
                )
        check_call(instrument(sample.extras["code"]), sample.extras["call"])

    def judge(self, sample: Sample) -> float:
        traced = instrument(sample.extras["code"])
        seen = run(traced, sample.extras["call"])
        step = sample.extras.get("step")
        if step is None:
            boxed = last_boxed(sample.completion)
            returned = next((value for name, value in reversed(seen) if name == RETURN), None)
            return float(boxed is not None and returned is not None and same(boxed, returned))
        # every point is passed at most once and in order: one that is missing ends the trace
        reached = step < len(seen) and seen[step][0] == traced.names[step]
        return float(reached and same(sample.completion, seen[step][1]))


def same(claimed: str, value: str) -> bool:
    """Whether a text spells the value: the same literal, or the same characters."""
    claimed = claimed.strip().strip("`")[:_MAX_CHARACTERS]
    if claimed == value:
        return True
    known, wanted = _literal(claimed), _literal(value)
    return known is not None and wanted is not None and type(known[0]) is type(wanted[0]) and known == wanted


def _literal(text: str) -> tuple[Any] | None:
    try:
        return (ast.literal_eval(text),)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None

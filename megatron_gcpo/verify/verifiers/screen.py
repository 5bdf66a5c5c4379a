"""Which answers to data sets that evaluate them are harmless expressions, decided on the syntax tree alone.

Several reasoning-gym scorers hand the model's answer to ``eval`` or to SymPy's ``parse_expr`` (which evals).
Confinement keeps what runs there from doing harm outside, but code in the scorer's own process could still declare
itself right. So what is not an expression of the expected kind is never handed over.
"""

from __future__ import annotations

import ast
import re

from megatron_gcpo.verify.base import Rejected

LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Data sets that eval an answer in the hope of a list; plain text is compared first."""
FORMULAS = frozenset(
    {"countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"}
)
"""Data sets that parse an answer as a SymPy expression."""

_FUNCTIONS = frozenset(
    [
        *("sqrt", "cbrt", "exp", "log", "ln", "Abs", "sign", "erf", "factorial", "Rational", "Integer", "Float"),
        *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    ]
)
_FORMULA_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Name, ast.Constant, ast.Call, ast.Load),
    *(ast.operator, ast.unaryop),
)
_LITERAL_NODES = (*_FORMULA_NODES, ast.List, ast.Tuple, ast.Set, ast.Dict)
_FACTORIALS = re.compile(r"[\d\s.+\-*/()!]*")
_MAX_CHARACTERS = 2000


def check(dataset: str, answer: str) -> bool:
    """Whether the scorer of this data set may see the answer; False means that it could only score it 0.

    Raises:
        Rejected: the answer is code.
    """
    if dataset not in LITERALS | FORMULAS:
        return True
    if len(answer) > _MAX_CHARACTERS:
        raise Rejected(f"an answer of {len(answer)} characters, at most {_MAX_CHARACTERS} are evaluated")
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        # Python cannot read it, so eval could not either; SymPy adds factorials, whose characters run nothing.
        return dataset in LITERALS or _FACTORIALS.fullmatch(answer) is not None
    allowed = _LITERAL_NODES if dataset in LITERALS else _FORMULA_NODES
    for node in ast.walk(tree):
        if not isinstance(node, allowed):
            raise Rejected(f"the answer is code ({type(node).__name__})")
        if isinstance(node, ast.Call) and not _is_known_function(node, dataset):
            raise Rejected("the answer calls a function")
        if isinstance(node, ast.Constant) and dataset in FORMULAS and not isinstance(node.value, int | float):
            raise Rejected("the answer holds text where a number belongs")
    return True


def _is_known_function(call: ast.Call, dataset: str) -> bool:
    named = isinstance(call.func, ast.Name) and call.func.id in _FUNCTIONS
    return dataset in FORMULAS and named and not call.keywords

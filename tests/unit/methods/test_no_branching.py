"""The trainer never asks which method it runs: no comparison with a method's name outside methods/."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megatron_gcpo
from megatron_gcpo.methods import METHODS

PACKAGE = Path(megatron_gcpo.__file__).parent


def branches_on_method(source: str) -> list[int]:
    """Lines that compare something with a method's name, compare ``method`` or ``method.name`` / ``method["name"]``, or
    match a case on a method's name."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [leaf for side in (node.left, *node.comparators) for leaf in _leaves(side)]
            if any(_is_method_name(side) for side in sides):
                lines.append(node.lineno)
        elif isinstance(node, ast.MatchValue) and _is_method_name(node.value):
            lines.append(node.lineno)
    return lines


def _leaves(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]


def _is_method_name(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return node.value in METHODS
    return ast.unparse(node).endswith(("method.name", "method['name']", "method_name", "METHOD.name"))


def test_package_does_not_branch_on_the_method():
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if PACKAGE / "methods" not in path.parents
        for line in branches_on_method(path.read_text(encoding="utf-8"))
    }
    assert not found, "methods are records of functions; put the difference into the record"


@pytest.mark.parametrize(
    "source",
    [
        'if name == "gcpo": pass',
        'if "grpo" != name: pass',
        'x = name in ("dapo", "rloo")',
        "if method.name == other: pass",
        'if config.method["name"] is None: pass',
        'match name:\n    case "dr_grpo": pass',
    ],
)
def test_the_detector_detects(source):
    assert branches_on_method(source)


def test_the_detector_leaves_defaults_alone():
    assert not branches_on_method('section = {"name": "gcpo"}\nprint(method.name)\nif kind == "task": pass')

"""Programs with trace points: where a reader has to know the value of a variable, and what it really is.

``trace("x", x)`` is inserted after statements of a function that set one variable, at most ten times: never inside a loop or
a branch (a loop's own variables are traced once behind it), always before the last return, as ``trace("return", ...)``.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

MAX_POINTS = 10
RETURN = "return"


@dataclass(frozen=True, kw_only=True)
class Traced:
    """An instrumented program."""

    code: str
    """With the calls of ``trace``."""
    function: str
    """The function that is traced: the last one of the program."""
    names: tuple[str, ...]
    """What each trace point names, in the order of the text; the last one is "return"."""


def instrument(code: str) -> Traced:
    """Trace points in the last function of a program.

    Raises:
        ValueError: no Python, no function, one that does not end with a return of something, one that is called from within
            the program (its points would be passed in an order that nobody can read off), or the name ``trace`` in use.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the code cannot be read: {error}") from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if not functions:
        raise ValueError("the code defines no function")
    function = functions[-1]
    last = function.body[-1]
    if not isinstance(last, ast.Return) or last.value is None:
        raise ValueError(f"the function {function.name} does not end with a return of a value")
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if function.name in used:
        raise ValueError(f"the function {function.name} is called from within the program")
    if "trace" in used or any(node.name == "trace" for node in functions):
        raise ValueError("the code uses the name trace itself")
    points = [(i, name) for i, node in enumerate(function.body[:-1]) if (name := _sets(node)) is not None]
    kept = dict(_spread(points, MAX_POINTS - 1))
    body: list[ast.stmt] = []
    for i, node in enumerate(function.body[:-1]):
        body.append(node)
        if i in kept:
            body.append(ast.Expr(_call(kept[i], ast.Name(kept[i], ast.Load()))))
    function.body = [*body, ast.Return(_call(RETURN, last.value))]
    names = (*(kept[i] for i in sorted(kept)), RETURN)
    return Traced(code=ast.unparse(ast.fix_missing_locations(tree)), function=function.name, names=names)


def check_call(traced: Traced, call: str) -> None:
    """ValueError unless the call is an expression that calls the traced function exactly once."""
    try:
        tree = ast.parse(call, mode="eval")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the call {call[:60]!r} cannot be read: {error}") from None
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == traced.function]
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.func in named]
    if len(named) != 1 or len(called) != 1:
        raise ValueError(f"the call {call[:60]!r} must call {traced.function} once")


def run(traced: Traced, call: str) -> list[tuple[str, str]]:
    """(name, repr) of every trace point that a call reaches. Executes the program: call it where that is safe."""
    seen: list[tuple[str, str]] = []

    def trace(name: str, value: object) -> object:
        seen.append((name, repr(value)))
        return value

    namespace: dict[str, object] = {"trace": trace}
    exec(compile(traced.code, "program", "exec"), namespace)
    eval(compile(call, "call", "eval"), namespace)
    return seen


def question(traced: Traced, call: str) -> str:
    """The problem as a prompt: the program, the call, and the form of the answer."""
    lines = "\n".join(f"{name}: ..." for name in traced.names)
    return (
        f"trace(name, value) prints a line with the name, a colon and repr(value), and returns the value.\n\n"
        f"```python\n{traced.code}\n```\n\nWork out what {call} does. Write each printed line as you get to it, exactly as it "
        f"is printed:\n{lines}\nThen put the value of {call} in \\boxed{{}}."
    )


def _sets(node: ast.stmt) -> str | None:
    """The variable that a statement sets last; None when it sets none, or nobody can be sure that it does."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(target=ast.Name(id=name)):
            return name
        case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
            return name
        case ast.For() | ast.While():
            # x += ... needs an x from before: behind the loop there is one, however often it ran
            changed = [child.target for child in ast.walk(node) if isinstance(child, ast.AugAssign)]
            names = [target.id for target in changed if isinstance(target, ast.Name)]
            return names[-1] if names else None
    return None


def _call(name: str, value: ast.expr) -> ast.Call:
    return ast.Call(func=ast.Name("trace", ast.Load()), args=[ast.Constant(name), value], keywords=[])


def _spread[T](items: Sequence[T], count: int) -> list[T]:
    """At most ``count`` of them, evenly spread, in order."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]

"""Trace points: where they are, what they show, and what cannot be traced."""

from __future__ import annotations

import json

import pytest

from megatron_gcpo.data.trace import MAX_POINTS, check_call, instrument, question, run
from tools import trace_code

CODE = """
def double(n):
    m = 2 * n
    return m

def total(items, scale):
    size = len(items)
    result: int = 0
    for item in items:
        part = double(item)
        result += part * scale
    if result > 10:
        label = 'big'
    result -= size
    return [result, size]
"""


def test_points_are_behind_statements_that_surely_set_a_variable():
    """Not in the loop (once behind it), not in the branch, not in other functions."""
    traced = instrument(CODE)
    assert traced.function == "total"
    assert traced.names == ("size", "result", "result", "result", "return")
    assert run(traced, "total([1, 2], scale=3)") == [
        ("size", "2"),
        ("result", "0"),
        ("result", "18"),
        ("result", "16"),
        ("return", "[16, 2]"),
    ]
    assert run(traced, "total([], 3)")[2:] == [("result", "0"), ("result", "0"), ("return", "[0, 0]")]


def test_instrumenting_changes_no_result():
    plain: dict = {}
    exec(CODE, plain)
    traced = instrument(CODE)
    for items in ([], [1], [5, 6, 7]):
        assert run(traced, f"total({items}, 2)")[-1][1] == repr(plain["total"](items, 2))


def test_at_most_ten_points_the_last_before_the_return():
    code = "def f(x):\n" + "".join(f"    a{i} = x + {i}\n" for i in range(30)) + "    return a29"
    traced = instrument(code)
    assert len(traced.names) == MAX_POINTS
    assert traced.names[-1] == "return"
    assert traced.names[:-1] == tuple(f"a{i * 30 // 9}" for i in range(9))


def test_an_early_return_ends_the_trace():
    traced = instrument("def f(x):\n    y = x\n    if y:\n        return 0\n    z = 1\n    return z")
    assert traced.names == ("y", "z", "return")
    assert run(traced, "f(1)") == [("y", "1")]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(:", "cannot be read"),
        ("x = 1", "defines no function"),
        ("def f(x):\n    x += 1", "does not end with a return"),
        ("def f(x):\n    return", "does not end with a return"),
        ("def f(x):\n    y = f(x - 1) if x else 0\n    return y", "called from within"),
        ("def f(x):\n    y = trace(x)\n    return y", "the name trace"),
    ],
)
def test_what_cannot_be_traced(code, message):
    with pytest.raises(ValueError, match=message):
        instrument(code)


@pytest.mark.parametrize(
    "call", ["total", "total([1], 1) + total([2], 1)", "double(2)", "total([1]", "[total][0]([1], 2)"]
)
def test_a_call_must_call_once(call):
    with pytest.raises(ValueError, match=r"the call"):
        check_call(instrument(CODE), call)
    check_call(instrument(CODE), "sum(total([1], 2))")


def test_tool(tmp_path, capsys):
    rows = [{"code": CODE, "call": "total([1], 2)"}, {"code": "x = 1", "call": "x"}, {"code": CODE, "call": "total"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert trace_code.main([str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]) == 0
    (row,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert row["prompt"] == question(instrument(CODE), "total([1], 2)")
    assert row["code"] == CODE
    assert "result: ...\nreturn: ..." in row["prompt"]
    errors = capsys.readouterr().err
    assert "in.jsonl:2: the code defines no function" in errors
    assert "in.jsonl:3: the call 'total' must call total once" in errors
    (tmp_path / "in.jsonl").write_text("{}\n")
    assert trace_code.main([str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]) == 2

"""What the policy is asked about a prompt, and what is read from its answer."""

from __future__ import annotations

import pytest

from megatron_gcpo.environments.forecast import question, read


@pytest.mark.parametrize(
    ("text", "forecast"),
    [
        (r"I solve this half of the time. \boxed{0.25}", 0.25),
        (r"\boxed{0}", 0.0),
        (r"first \boxed{0.2}, no, \boxed{ .125 }", 0.125),
        (r"\boxed{$0.1$}", 0.1),
        (r"\boxed{0.}", 0.0),
        (r"\boxed{0.26}", None),
        (r"\boxed{1}", None),
        (r"\boxed{-0.1}", None),
        (r"\boxed{1/8}", None),
        (r"\boxed{nan}", None),
        (r"\boxed{1e-3}", None),
        (r"\boxed{0.1 or 0.2}", None),
        (r"\boxed{0.1", None),
        (r"\boxed{" + "0" * 10_000 + "}", None),
        ("0.1", None),
        ("", None),
    ],
)
def test_only_a_boxed_number_from_0_to_a_quarter_is_a_forecast(text, forecast):
    assert read(text) == forecast


def test_question_shows_the_last_outcomes_before_the_problem():
    asked = question("what is 3 + 4 ?", [("easy", 0.0), ("fair", 0.2344)])
    parts = ["Problem: easy\nVariance: 0.0000", "Problem: fair\nVariance: 0.2344", "judge: what is 3 + 4 ?", "\\boxed"]
    places = [asked.index(part) for part in parts]
    assert places == sorted(places)
    assert "outcomes" not in question("what is 3 + 4 ?", [])

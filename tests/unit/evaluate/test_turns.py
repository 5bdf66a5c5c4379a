"""Shares of what further turns changed."""

from __future__ import annotations

import itertools

import pytest

from megatron_gcpo.evaluate.turns import TRANSITIONS, transition_shares


def test_shares_of_two_turns():
    right, wrong = True, False
    turns = [(wrong, right), (wrong, right), (right, right), (right, wrong), (wrong, wrong)]
    shares = transition_shares(turns)
    assert shares == {"first_turn": 0.4, "repaired": 0.4, "held": 0.2, "broken": 0.2, "lost": 0.2}


def test_transitions_sum_to_one_and_lead_from_the_first_turn_to_the_last():
    """With two turns: last = first + repaired - broken, for every table of four conversations."""
    for rows in itertools.product(itertools.product((False, True), repeat=2), repeat=4):
        shares = transition_shares(rows)
        assert sum(shares[name] for name in TRANSITIONS.values()) == pytest.approx(1)
        last = sum(row[-1] for row in rows) / 4
        assert shares["first_turn"] + shares["repaired"] - shares["broken"] == pytest.approx(last)


def test_more_turns_have_more_transitions():
    shares = transition_shares([(False, True, False), (True, True, True)])
    assert shares == {"first_turn": 0.5, "repaired": 0.25, "held": 0.5, "broken": 0.25, "lost": 0.0}

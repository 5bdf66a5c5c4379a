"""Numbers that are merged over replicas, and seconds that add up."""

from __future__ import annotations

import pickle
import time
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.observe.tally import Tally
from megatron_gcpo.observe.timers import PHASES, Stopwatch

values = st.lists(st.floats(-1e6, 1e6), max_size=5)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), values), max_size=4))
def test_merged_tallies_have_the_mean_of_all_values(replicas: list[dict[str, list[float]]]) -> None:
    """The mean over everything, not the mean of the replicas' means; what nobody counted is left out."""
    tallies = []
    for numbers in replicas:
        tally = Tally()
        for name, added in numbers.items():
            tally.add(name, added)
        tallies.append(pickle.loads(pickle.dumps(tally)))  # as it travels
    pooled = {name: [v for numbers in replicas for v in numbers.get(name, [])] for name in "abc"}
    expected = {name: np.mean(all_) for name, all_ in pooled.items() if all_}
    assert Tally().merge(tallies).means() == pytest.approx(expected, abs=1e-6)


def test_merging_leaves_the_parts_alone() -> None:
    one, two = Tally(), Tally()
    one.add("x", 1.0)
    two.add("x", [3.0, 5.0])
    assert one.merge([two]).means() == {"x": 3.0}
    assert (one.means(), two.means()) == ({"x": 1.0}, {"x": 4.0})


def test_prefixes_and_integers() -> None:
    tally = Tally()
    tally.add_all({"a": 1, "b": 2.5}, prefix="p/")
    tally.add("p/a", 0)
    assert tally.means() == {"p/a": 0.5, "p/b": 2.5}


class _Watch:
    def __init__(self) -> None:
        self.phases: list[str] = []

    @contextmanager
    def phase(self, name: str):
        self.phases.append(name)
        yield


def test_phases_and_the_rest_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that shows what we say: 1 s before, 2 s and 3 s of generate, 4 s between, 5 s of push."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = _Watch()
    clock = Stopwatch(watch)  # pyright: ignore[reportArgumentType]
    now[0] += 1
    for seconds in (2, 3):
        with clock("generate"):
            now[0] += seconds
    now[0] += 4
    with clock("push"):
        now[0] += 5
    seconds = clock.seconds()
    assert seconds == {**dict.fromkeys(PHASES, 0.0), "generate": 5.0, "push": 5.0, "other": 5.0, "total": 15.0}
    assert sum(seconds.values()) == 2 * seconds["total"]
    assert watch.phases == ["generate", "generate", "push"]


def test_an_unknown_phase_is_refused() -> None:
    clock = Stopwatch(_Watch())  # pyright: ignore[reportArgumentType]
    with pytest.raises(KeyError), clock("generat"):
        pass

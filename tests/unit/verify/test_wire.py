"""Frames survive any cutting; a judge's bytes can only ever become a verdict."""

from __future__ import annotations

import itertools
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.verify import wire
from megatron_gcpo.verify.judge import STATUSES, Verdict, clean


def read_all(stream: bytes, cuts: list[int], limit: int) -> list[bytes]:
    """What a Reader makes of a stream that arrives in pieces."""
    reading, writing = os.pipe()
    reader, found = wire.Reader(reading, limit), []
    bounds = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    try:
        for first, last in itertools.pairwise(bounds):
            os.write(writing, stream[first:last])
            assert reader.pull()
            found += reader.frames()
    finally:
        os.close(writing)
        os.close(reading)
    return found


@given(bodies=st.lists(st.binary(max_size=300), max_size=8), cuts=st.lists(st.integers(0, 2000), max_size=20))
def test_frames_come_back_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    assert read_all(b"".join(map(wire.frame, bodies)), cuts, limit=300) == bodies


def test_a_length_beyond_the_limit_is_refused_before_the_body_is_held() -> None:
    assert read_all(wire.frame(b"x" * 100), [], limit=100) == [b"x" * 100]
    with pytest.raises(wire.BadFrame, match="101 bytes, at most 100"):
        read_all(wire.frame(b"x" * 101), [], limit=100)


def test_the_end_of_the_stream_is_told() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    assert not wire.Reader(reading, 10).pull()
    os.close(reading)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(STATUSES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(
    body=st.binary(max_size=200)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries({"reward": JSON, "status": JSON, "message": JSON}).map(lambda v: json.dumps(v).encode())
)
def test_no_bytes_become_more_than_a_verdict(body: bytes) -> None:
    verdict = Verdict.parse(body)
    assert 0 <= verdict.reward <= 1
    assert verdict.status in ("ok", "error", "rejected")
    assert verdict.status == "ok" or verdict.reward == 0
    assert len(verdict.message) <= 200
    assert verdict.message.isascii()
    assert verdict.message.isprintable()


@pytest.mark.parametrize("body", [b"[" * 4000, b'{"reward": ' + b"9" * 4000 + b', "status": "ok", "message": ""}'])
def test_json_bombs_are_errors(body: bytes) -> None:
    assert Verdict.parse(body).status == "error"


@given(reward=st.floats(0, 1), message=st.text(max_size=300))
def test_a_verdict_comes_back_as_it_was_sent(reward: float, message: str) -> None:
    verdict = Verdict(reward=reward, status="ok", message=clean(message))
    assert Verdict.parse(verdict.dump()) == verdict
    assert len(verdict.dump()) <= wire.MAX_VERDICT_BYTES

"""The pusher's end of a connection: what overlaps, what waits, and what a worker's report must say."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_gcpo.config.records import PushConfig
from megatron_gcpo.reshard.channel import Channel
from megatron_gcpo.reshard.endpoint import Endpoint
from megatron_gcpo.reshard.transport import Section

TIMEOUT_S = 20.0


class Control:
    """One worker in this process, whose every call can be held up."""

    num_workers, same_host = 1, True

    def __init__(self) -> None:
        self.endpoint = Endpoint(lambda weights: None, torch.device("cpu"))
        self.may_take = threading.Semaphore(0)
        self.taken: list[int] = []
        self.report: dict[str, Any] = {}
        self.abandoned = 0

    def rpc(self, method: str, arguments: Any = None) -> list[Any]:
        if method == "gcpo_describe":
            return [self.endpoint.describe()]
        if method == "gcpo_report":
            return [{"name": self.endpoint.name, **self.report}]
        if method == "gcpo_abandon":
            self.abandoned += 1
        return [None]

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self.endpoint.connect(**init_info)

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        assert self.may_take.acquire(timeout=TIMEOUT_S)
        if update_info["bucket"] == 7:
            raise ValueError("a worker fell over")
        self.taken.append(update_info["bucket"])

    def finish_weight_update(self, version: int) -> None:
        pass


def opened(control: Control, **config: Any) -> Channel:
    channel = Channel.open(
        control, PushConfig(**config), device=torch.device("cpu"), folder=Path("unused"), bucket_bytes=64
    )
    channel.begin(whole=False)
    return channel


def send(channel: Channel) -> int:
    slot = channel.free_slot()
    channel.send({channel.workers[0]: Section(0, 64)})
    return slot


def test_a_bucket_is_filled_while_the_one_before_is_delivered() -> None:
    """Were a delivery not to overlap, the second free_slot would wait for a worker that is held up."""
    control = Control()
    channel = opened(control)
    assert [send(channel), send(channel)] == [0, 1]
    assert control.taken == []
    third: list[int] = []
    waiting = threading.Thread(target=lambda: third.append(send(channel)))
    waiting.start()
    waiting.join(0.2)
    assert third == [], "the first buffer was given away while a worker was still reading it"
    control.may_take.release(3)
    waiting.join(TIMEOUT_S)
    assert third == [0]
    control.report = {"num_buckets": 3, "incomplete": [], "marks": {"w": 5}}
    channel.compare({channel.workers[0]: {"w": 5}})
    assert control.taken == [0, 1, 2]
    channel.close()


REPORTS: dict[str, tuple[dict[str, Any], str]] = {
    "a bucket too few": ({"num_buckets": 0}, "0 of 1 buckets arrived"),
    "half a tensor": ({"incomplete": ["w"]}, "only parts arrived of 'w'"),
    "nothing of one": ({"marks": {"w": 1}}, "nothing arrived of 'v'"),
    "other bytes": ({"marks": {"w": 1, "v": 3}}, "other bytes arrived than were sent of 'v'"),
}


@pytest.mark.parametrize(("report", "said"), REPORTS.values(), ids=REPORTS)
def test_a_report_that_is_not_what_was_sent_names_the_tensors(report: dict[str, Any], said: str) -> None:
    control = Control()
    control.may_take.release(1)
    channel = opened(control)
    send(channel)
    control.report = {"num_buckets": 1, "incomplete": [], "marks": {"w": 1, "v": 2}, **report}
    with pytest.raises(ValueError, match=said):
        channel.compare({channel.workers[0]: {"w": 1, "v": 2}})
    channel.close()


def test_fingerprints_that_are_off_are_not_looked_at() -> None:
    control = Control()
    channel = opened(control, fingerprint=False)
    control.report = {"num_buckets": 0, "incomplete": [], "marks": {}}
    channel.compare({})
    channel.close()


def test_a_delivery_that_fails_comes_out_where_the_next_bucket_is_asked_for() -> None:
    control = Control()
    control.may_take.release(100)
    channel = opened(control)
    for _ in range(8):
        send(channel)
    send(channel)
    with pytest.raises(ValueError, match="a worker fell over"):
        channel.free_slot()
    channel.abandon()
    assert control.abandoned == 1
    channel.close()


def test_a_channel_knows_when_its_workers_belong_to_another() -> None:
    control = Control()
    channel = opened(control)
    assert channel.is_current()
    other = opened(control)
    assert not channel.is_current()
    assert other.is_current()
    control.endpoint = Endpoint(lambda weights: None, torch.device("cpu"))
    assert not other.is_current()
    channel.close()
    other.close()

"""Servers without a model, and engines on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_gcpo.config.records import RolloutConfig, VllmConfig


@pytest.fixture
def servers() -> Iterator[Callable[..., list[Any]]]:
    from tests.vllm.fake_server import FakeServer

    started: list[FakeServer] = []

    def start(count: int, **options: Any) -> list[FakeServer]:
        new = [FakeServer(**options) for _ in range(count)]
        started.extend(new)
        return new

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def connect() -> Iterator[Callable[..., Any]]:
    from megatron_gcpo.rollout.vllm.server import ServerEngine
    from tests.unit.rollout.vllm.fakes import POSITIONS
    from tests.vllm.fake_server import VOCAB_SIZE, FakeServer

    engines: list[ServerEngine] = []

    def make(*fakes: FakeServer | str, **vllm: Any) -> ServerEngine:
        urls = tuple(fake if isinstance(fake, str) else fake.url for fake in fakes)
        settings = VllmConfig(**{"urls": urls, "start_timeout_s": 0.5, **vllm})
        config = AutoConfig.for_model("qwen3", vocab_size=VOCAB_SIZE)
        rollout = RolloutConfig(engine="vllm_server", vllm=settings, max_batch_rows=8)
        engine = ServerEngine(settings.urls, config, rollout, dtype="fp32", max_positions=POSITIONS)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()

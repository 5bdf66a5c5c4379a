"""Tests with a real vLLM: skipped, with the reason, where none is installed."""

import pytest

from megatron_gcpo.rollout.vllm import capabilities


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        capabilities.installed()
    except ValueError as error:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason=str(error)))

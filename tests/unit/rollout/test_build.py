"""Which engine a configuration gets, and on which devices."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen3Config

from megatron_gcpo.cluster.platform import install
from megatron_gcpo.config import validate
from megatron_gcpo.rollout.build import check_engine, colocated_devices, make_engine, max_positions
from megatron_gcpo.rollout.transformers_engine import TransformersEngine
from megatron_gcpo.rollout.vllm import capabilities
from tests.unit.config.test_checks import changed


def config(**fields: Any):
    return validate(changed(**fields), origin="r")


def test_the_default_is_the_embedded_engine() -> None:
    shape = {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
    engine = make_engine(config(), Qwen3Config(**shape, num_key_value_heads=1, head_dim=8), install("cpu"))
    assert isinstance(engine, TransformersEngine)


def test_the_longest_sequence_is_what_the_data_allows_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max_positions(config()) == 24 + 64
    assert max_positions(config(rollout__vllm={"max_model_len": 100})) == 100


@pytest.mark.parametrize(
    ("processes", "width", "own", "visible", "expected"),
    [
        (2, 1, 0, 2, (0,)),
        (2, 2, 0, 2, (0, 1)),
        (8, 2, 4, 8, (4, 5)),
        (2, 4, 0, 8, (0, 1, 2, 3)),  # one replica: the others belong to nobody
        (8, 4, 0, 8, None),  # would reach into the next replica's
        (2, 2, 0, 1, None),
        (2, 1, 0, 1, (0,)),
    ],
)
def test_a_colocated_engine_takes_the_gpus_from_its_leader_on(
    processes: int, width: int, own: int, visible: int, expected: tuple[int, ...] | None
) -> None:
    """Trainer TP=2, so that leaders are two devices apart."""
    run = config(cluster__processes_per_node=processes, rollout__vllm={"tensor_parallel_size": width})
    if expected is not None:
        assert colocated_devices(run, own, visible) == expected
    else:
        with pytest.raises(ValueError, match=r"tensor_parallel_size .* rollout\.engine=vllm_server"):
            colocated_devices(run, own, visible)


def test_what_vllm_cannot_hold_is_known_without_starting_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "installed", lambda: capabilities.Installed(version="0.32.0", cpu=True))
    sound = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    check_engine(config(), Qwen3Config(head_dim=24), cpu=True)  # another engine takes it
    run = config().model_copy(update={"rollout": config().rollout.model_copy(update={"engine": "vllm"})})
    check_engine(run, sound, cpu=True)
    with pytest.raises(ValueError, match="no kernel for head size 24"):
        check_engine(run, Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=24), cpu=True)
    with pytest.raises(ValueError, match="built for a CPU"):
        check_engine(run, sound, cpu=False)

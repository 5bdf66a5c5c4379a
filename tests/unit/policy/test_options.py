"""Option names of Megatron pass through as they are, and a wrong one is told the nearest right one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.policy.options import checked, option_names


@dataclass
class Target:
    lr: float = 0.1
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    params_dtype: torch.dtype = torch.float32
    main_grads_dtype: torch.dtype = torch.float32
    derived: int = field(default=0, init=False)
    _hidden: int = 0


class Scheduler:
    def __init__(self, optimizer: object, max_lr: float, lr_decay_style: str = "constant") -> None: ...


RESERVED = {"params_dtype": "model.dtype"}


def test_names_are_those_of_a_dataclass_or_a_constructor() -> None:
    assert option_names(Target) == {"lr", "weight_decay", "clip_grad", "params_dtype", "main_grads_dtype"}
    assert option_names(Scheduler) == {"optimizer", "max_lr", "lr_decay_style"}


@given(st.dictionaries(st.sampled_from(["lr", "weight_decay", "clip_grad"]), st.floats() | st.none() | st.text()))
def test_values_pass_through_verbatim(given_options: dict[str, object]) -> None:
    passed = checked("train.optimizer", given_options, Target, RESERVED)
    assert passed is not given_options
    assert passed.keys() == given_options.keys()
    assert all(passed[name] is value for name, value in given_options.items())


def test_dtypes_are_named_as_in_the_rest_of_the_configuration() -> None:
    assert checked("o", {"main_grads_dtype": "bf16"}, Target, {}) == {"main_grads_dtype": torch.bfloat16}
    assert checked("o", {"main_grads_dtype": torch.float16}, Target, {}) == {"main_grads_dtype": torch.float16}
    assert checked("o", {"lr": "bf16"}, Target, {}) == {"lr": "bf16"}


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("learning_decay", "weight_decay"), ("clipgrad", "clip_grad"), ("LR", "lr")]
)
def test_an_unknown_name_is_told_the_nearest(wrong: str, nearest: str) -> None:
    expected = rf"train\.optimizer\.{wrong} is not an option of Megatron's Target: did you mean {nearest}\?$"
    with pytest.raises(ValueError, match=expected):
        checked("train.optimizer", {wrong: 1}, Target, RESERVED)


def test_a_reserved_name_is_told_who_decides_it_and_never_proposed() -> None:
    with pytest.raises(ValueError, match=r"train\.optimizer\.params_dtype is decided by model\.dtype"):
        checked("train.optimizer", {"params_dtype": "bf16"}, Target, RESERVED)
    with pytest.raises(ValueError, match="did you mean main_grads_dtype"):
        checked("train.optimizer", {"param_dtype": "bf16"}, Target, RESERVED)

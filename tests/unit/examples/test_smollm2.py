"""The SmolLM2 example's own parts, without its model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def _load(name: str) -> ModuleType:
    path = Path(__file__).parents[3] / "examples" / "smollm2" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


heads, make_problems = _load("heads"), _load("make_problems")

SIZES = {
    "vocab_size": 31,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}


def made(state: dict[str, torch.Tensor], config: LlamaConfig) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config)
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    return model


def own_state(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def test_padded_heads_do_nothing_learn_nothing_and_come_off_again() -> None:
    """Two steps of Adam on the padded model and on the original one: the same logits, and the same weights afterwards."""
    torch.manual_seed(0)
    narrow = LlamaForCausalLM(LlamaConfig(**SIZES))
    state, config = heads.pad_heads(own_state(narrow), narrow.config, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (12, 4, 8)
    wide = made(state, config)
    ids = torch.randint(0, SIZES["vocab_size"], (3, 12))
    torch.testing.assert_close(wide(ids).logits, narrow(ids).logits, rtol=1e-5, atol=1e-6)
    for model in (wide, narrow):
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(2):
            adam.zero_grad()
            model(ids, labels=ids).loss.backward()
            adam.step()
    back, restored = heads.strip_heads(own_state(wide), wide.config, 3)
    assert restored.num_attention_heads == 9
    for name, value in own_state(narrow).items():
        torch.testing.assert_close(back[name], value, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(made(back, restored)(ids).logits, wide(ids).logits, rtol=1e-5, atol=1e-6)


def test_heads_that_do_something_stay() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match=r"v_proj.weight is not zero in the heads beyond 2"):
        heads.strip_heads(own_state(model), model.config, 2)


def test_problems_are_disjoint_right_and_always_the_same() -> None:
    split = make_problems.split()
    assert split == make_problems.split()
    assert not set(split["train"]) & set(split["heldout"])
    trained = [many for _, _, many in make_problems.KINDS.values()]
    for name, each in (("train", trained), ("heldout", [make_problems.HELDOUT_EACH] * 3)):
        problems = split[name]
        assert len(set(problems)) == len(problems)
        products, longer = sum(sign == "*" for _, sign, _ in problems), sum(a > 9 for a, _, _ in problems)
        assert [products, len(problems) - products - longer, longer] == each
        for a, sign, b in problems:
            row = make_problems.row((a, sign, b))
            assert row["prompt"].endswith(f"\n{a} {sign} {b} =")
            assert int(row["answer"]) == eval(f"{a} {sign} {b}")
            assert f"\n{a} {sign} {b} = " not in "\n" + row["prompt"]

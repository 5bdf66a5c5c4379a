"""What must have room counts every turn of a conversation and every question to the policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gcpo.cluster.platform import install
from megatron_gcpo.config import Config, load
from megatron_gcpo.environments.critic import CRITIC
from megatron_gcpo.environments.forecast import FRAME_TOKENS
from megatron_gcpo.methods import longest_sequences, resolve
from tests.dist.tiny import write_recipe

install("cpu")

from megatron_gcpo.plan.memory import workload  # noqa: E402
from megatron_gcpo.preflight import _arithmetic, preflight  # noqa: E402
from megatron_gcpo.rollout.build import max_positions  # noqa: E402

QUICK = "configs/recipe/quickstart.yaml"
ROOM = "train.max_tokens_per_micro_batch=4096"
PROMPT, NEW = 24, 64
TALK = PROMPT + 2 * NEW + CRITIC.max_reply_tokens
ASKED = 4 * PROMPT + FRAME_TOKENS + 256


def config(*overrides: str) -> Config:
    return load(QUICK, [*overrides, ROOM])


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (["method/grpo"], [PROMPT + NEW]),
        (["method/recrit"], [TALK]),
        (["method/metis"], [PROMPT + NEW, ASKED]),
        (["method/metis", "method.sampler={name: judged, recent: 0}"], [PROMPT + NEW, PROMPT + FRAME_TOKENS + 256]),
        (["method/recrit", "method.sampler=judged"], [TALK, ASKED]),
    ],
)
def test_longest_sequences(overrides, tokens):
    settings = config(*overrides, "method.loss.reduce=token_mean")
    found = list(longest_sequences(*resolve(settings.method), settings))
    assert [kind.tokens for kind in found] == tokens
    assert max_positions(settings) == max(tokens)
    assert workload(settings, None, None, has_reference=False).longest == max(tokens)
    assert f"a sequence: at most {max(tokens)} tokens" in _arithmetic(settings)


def test_an_engine_holds_what_it_is_told_to():
    assert max_positions(config("method/recrit", "rollout.vllm.max_model_len=777")) == 777


def test_the_planner_counts_every_turn():
    """Half of what is allowed, in each turn; a critic's words are read by the engine and trained over like a prompt's."""
    one, two = (workload(config(f"method/{name}"), None, None, has_reference=False) for name in ("grpo", "recrit"))
    assert (one.prompt_tokens, one.new_tokens) == (PROMPT // 2, NEW // 2)
    assert (two.prompt_tokens, two.new_tokens) == ((PROMPT + CRITIC.max_reply_tokens) // 2, NEW)
    assert workload(config("method/recrit"), 50, 9, has_reference=False).new_tokens == 50


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, train={"max_tokens_per_micro_batch": 1024})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["method.name=recrit"],
            r"a conversation of recrit about prompt '.*' can have 273 tokens .* holds 32 positions",
        ),
        (["method.name=metis"], r"method\.sampler judged asks the policy .* cannot be put: .*sampler: uniform"),
        (
            ["method.name=metis", "method.sampler={name: judged, candidates: 9}"],
            r"chooses among 36 candidates a step .* data\.train has 24 prompts",
        ),
    ],
)
def test_preflight_finds_what_has_no_room(tiny: Path, tmp_path: Path, overrides: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        preflight(load(str(tiny), overrides), tmp_path / "run")

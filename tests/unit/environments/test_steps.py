"""Steps in text, in tokens and in verdicts; predicted values judged by the real pool; the two advantages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.config.records import VerifyConfig
from megatron_gcpo.credit.tokens import rollout_batch
from megatron_gcpo.environments import judge_steps
from megatron_gcpo.environments.steps import Claim, steps_of_tokens, token_ends
from megatron_gcpo.methods import stepcode
from megatron_gcpo.types import CreditInputs, Group, Prompt, Rollout, Steps
from megatron_gcpo.verify.pool import VerifierPool
from megatron_gcpo.verify.verifiers.trace import same

CODE = "def f(x):\n    y = x + 1\n    z = y * 2\n    return z"
PROMPT = Prompt(id="a", token_ids=(1,), text="?", answer="f(1)", extras={"code": CODE, "call": "f(1)"})
RIGHT = "first\ny: 2\n`z: 4`\nreturn: 4\nso \\boxed{4}"
SHORTCUT = "y: 7\nz: 9\nreturn: 4\n\\boxed{4}"
SILENT = "\\boxed{5}"


def characters(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def rollout(text: str) -> Rollout:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    return Rollout(
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        text=text,
        finish_reason="stop",
        versions_T=np.zeros(len(ids), np.int32),
    )


def group(*texts: str) -> Group:
    return Group(prompt=PROMPT, rollouts=tuple(map(rollout, texts)))


def test_claims_are_lines_in_the_order_of_the_points():
    assert stepcode.split(PROMPT, RIGHT) == (
        Claim(end=11, text="2"),
        Claim(end=18, text="4"),
        Claim(end=28, text="4"),
    )
    assert [claim.text for claim in stepcode.split(PROMPT, "z: 1\ny: 2\nz: 3")] == ["2", "3", ""]
    assert [claim.end for claim in stepcode.split(PROMPT, SILENT)] == [0, 0, 0]
    assert stepcode.split(replace(PROMPT, extras={}), RIGHT) == ()


@given(st.text(max_size=30))
def test_token_ends_are_those_of_the_text(text):
    """Tokens are bytes here: the parts of a character end where it began, its last byte where it ends."""
    ids = list(text.encode())
    ends = token_ends(ids, characters)
    assert ends == [len(bytes(ids[: i + 1]).decode("utf-8", "ignore")) for i in range(len(ids))] or "\ufffd" in text


def test_tokens_belong_to_the_step_that_they_end_in():
    ids = list(b"ab\ncd\nef")
    assert steps_of_tokens([3, 3, 6], ids, characters).tolist() == [0, 0, 0, 2, 2, 2, 3, 3]
    assert steps_of_tokens([], ids, characters).tolist() == [0] * 8


@pytest.mark.parametrize(
    ("claimed", "value", "right"),
    [
        ("4", "4", True),
        (" `4` ", "4", True),
        ("4.0", "4", False),
        ("True", "1", False),
        ('"a"', "'a'", True),
        ("[1,2]", "[1, 2]", True),
        ("<f>", "<f>", True),
        ("__import__('os')", "4", False),
        ("", "4", False),
    ],
)
def test_same(claimed, value, right):
    assert same(claimed, value) is right


def test_steps_are_judged_by_running_the_program():
    """In the sandbox: values, the result, a point that is not reached, a program that does not end."""
    endless = replace(
        PROMPT, extras={"code": "def f(x):\n    y = x\n    while y:\n        pass\n    return y", "call": "f(1)"}
    )
    early = "def f(x):\n    y = x\n    if y:\n        return 0\n    z = 1\n    return z"
    early = replace(PROMPT, extras={"code": early, "call": "f(1)"})
    groups = [
        group(RIGHT, SHORTCUT, SILENT),
        Group(prompt=endless, rollouts=(rollout("y: 1\nreturn: 1\n\\boxed{1}"),)),
        Group(prompt=early, rollouts=(rollout("y: 1\nz: 1\nreturn: 1"),)),
    ]
    with VerifierPool(VerifyConfig(name="trace", num_workers=2, timeout_s=1, isolation="best_effort")) as pool:
        verdicts = pool.score(groups)
        steps = judge_steps(pool, groups, verdicts, stepcode.split, characters)
        with pytest.raises(ValueError, match="with a column code"):
            pool.score([Group(prompt=replace(PROMPT, extras={}), rollouts=(rollout("x"),))])
    assert [own.rewards_GK.tolist() for own in steps] == [
        [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]],
        [[0, 0, 0]],
        [[1, 0, 0, 0]],
    ]
    assert verdicts[1].statuses_G == ("timeout",)
    assert steps[0].step_of_token_G[0].tolist() == [0] * 11 + [1] * 7 + [2] * 10 + [3] * 12
    assert steps[0].step_of_token_G[2].tolist() == [3] * len(SILENT)


def paid(rewards_GK, tokens_G=None, **options):
    rewards_GK = torch.tensor(rewards_GK, dtype=torch.float64)
    each = torch.arange(rewards_GK.shape[1]).repeat_interleave(2)
    steps = Steps(rewards_GK=rewards_GK, step_of_token_G=tuple(tokens_G or [each] * len(rewards_GK)))
    inputs = CreditInputs(
        rewards_G=rewards_GK[:, -1], embeddings_GD=None, lengths_G=torch.ones(len(rewards_GK)).long(), steps=steps
    )
    return stepcode.credit(inputs, stepcode.StepcodeOptions(**options))


def test_within_an_answer():
    """Wrong: 0; right and followed by right ones: 2; by wrong ones: 1; the last one: its reward."""
    rewards_GK = torch.tensor([[0, 1, 1], [1, 1, 1], [1, 0, 0], [1, 1, 0]]).double()
    assert stepcode.within(rewards_GK).tolist() == [[0, 2, 1], [2, 2, 1], [1, 0, 0], [1.5, 1, 0]]


def test_a_value_that_everybody_knows_says_nothing_in_the_group():
    credit = paid([[1, 1], [1, 0]], intra=0.0)
    assert [own.tolist()[:2] for own in credit.token_advantages_G] == [[0, 0], [0, 0]]


def test_an_advantage_is_constant_in_a_step():
    for own_T in paid([[1, 0, 1], [0, 1, 1], [0, 0, 0]]).token_advantages_G:
        assert own_T[::2].tolist() == own_T[1::2].tolist()


def test_a_right_result_after_a_wrong_trace_earns_less_than_after_a_right_one():
    consistent, shortcut, lost = paid([[1, 1, 1], [0, 0, 1], [0, 0, 0]]).advantages_G.tolist()
    assert consistent > shortcut > lost


def test_tokens_get_what_their_step_earned():
    whole = group(RIGHT, SILENT)
    tokens = [torch.tensor([0] * 11 + [1] * 7 + [2] * 10 + [3] * 12), torch.full((len(SILENT),), 3)]
    credit = paid([[1, 1, 1, 1], [0, 0, 0, 0]], tokens)
    batch = rollout_batch([whole], [credit])
    assert batch.advantages_T[1:41].tolist() == pytest.approx(credit.token_advantages_G[0].tolist())
    assert batch.advantages_T[0] == 0


def test_rollouts_judged_as_a_whole_are_refused():
    inputs = CreditInputs(rewards_G=torch.ones(2), embeddings_GD=None, lengths_G=torch.ones(2))
    with pytest.raises(ValueError, match="judged as a whole"):
        stepcode.credit(inputs, stepcode.StepcodeOptions())

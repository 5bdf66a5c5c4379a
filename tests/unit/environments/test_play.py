"""Conversations as rollouts: what the engine is asked, which tokens are trained, and how each turn is judged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_gcpo.config.records import DataConfig, SourceConfig
from megatron_gcpo.credit.tokens import rollout_batch
from megatron_gcpo.data.template import turn_frame
from megatron_gcpo.environments import CRITIC, Environment, play, score, turns_of
from megatron_gcpo.environments.critic import ATTITUDES
from megatron_gcpo.environments.play import joint
from megatron_gcpo.rollout.engine import Sample, Sampling
from megatron_gcpo.types import Credit, Group, Prompt, Rollout, Verdicts

END = 9
FRAME = [END, 7, 8]


class Engine:
    """Answers with as many tokens as its request has digits of context, and remembers what it was asked."""

    max_positions = 60

    def __init__(self) -> None:
        self.asked = []

    def generate(self, requests, sampling):
        self.asked.append(list(requests))
        return [
            Sample(
                token_ids=np.array([len(r.prompt_token_ids), END]),
                logprobs=np.array([-0.5, -0.25], np.float32),
                finish_reason="stop",
                versions_T=np.array([4, 5], np.int32),
            )
            for r in requests
        ]


def rollout(ids, finish="stop", text="first") -> Rollout:
    return Rollout(
        token_ids=np.array(ids),
        logprobs=-np.ones(len(ids), np.float32),
        text=text,
        finish_reason=finish,
        versions_T=np.full(len(ids), 3, np.int32),
    )


def groups() -> list[Group]:
    prompt = Prompt(id="a", token_ids=(1, 2), text="?", answer="x")
    other = replace(prompt, id="b", token_ids=(1,))
    return [
        Group(prompt=prompt, rollouts=(rollout([3, END]), rollout([3, 4, 5], "length"))),
        Group(prompt=other, rollouts=(rollout([END]), rollout([6, END]))),
    ]


def played(engine=None, environment=CRITIC, **changes) -> list[Group]:
    settings = {
        "frame": lambda text: FRAME,
        "max_new_tokens": 5,
        "sampling": Sampling(),
        "decode": lambda ids: f"said {ids[0]}",
        "run_seed": 0,
        "step": 1,
    }
    return play(engine or Engine(), groups(), environment, **(settings | changes))


def test_context_of_a_turn_is_everything_before_it():
    """An answer that ended is not ended twice; one that was cut off is ended by the frame."""
    engine = Engine()
    played(engine)
    (asked,) = engine.asked
    assert [r.prompt_token_ids for r in asked] == [
        (1, 2, 3, 9, 7, 8),
        (1, 2, 3, 4, 5, 9, 7, 8),
        (1, 9, 7, 8),
        (1, 6, 9, 7, 8),
    ]
    assert len({r.seed for r in asked}) == 4
    assert joint(rollout([3, 4]), FRAME) == FRAME


def test_the_users_tokens_are_never_trained():
    whole = played()
    one = whole[0].rollouts[0]
    assert one.token_ids.tolist() == [3, 9, 7, 8, 6, 9]
    assert one.trained_T.tolist() == [True, True, False, False, True, True]
    assert one.logprobs.tolist() == [-1, -1, 0, 0, -0.5, -0.25]
    assert one.versions_T.tolist() == [3, 3, 4, 4, 4, 5]
    assert (one.text, one.turns, one.policy_version) == ("said 6", ("first", "said 6"), 3)
    credits = [Credit(credits_G=torch.ones(2), advantages_G=torch.tensor([2.0, -1.0])) for _ in whole]
    batch = rollout_batch(whole, credits)
    own = slice(0, 8)
    assert batch.tokens_T[own].tolist() == [1, 2, 3, 9, 7, 8, 6, 9]
    assert batch.mask_T[own].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert batch.advantages_T[own].tolist() == [0, 0, 2, 2, 0, 0, 2, 2]


def test_more_turns():
    three = Environment(name="three", num_turns=3, reply=lambda prompt, said, seed: said[-1])
    heard = []
    whole = played(environment=three, frame=lambda text: heard.append(text) or FRAME)
    one = whole[0].rollouts[0]
    assert one.turns == ("first", "said 6", "said 10")
    assert heard == ["first"] * 4 + ["said 6", "said 8", "said 4", "said 5"]
    assert one.trained_T.tolist() == [True, True, False, False, True, True, False, False, True, True]
    assert three.longest(10, 5) == 10 + 15 + 512


def test_a_group_meets_one_critic_whatever_it_answered():
    prompt = groups()[0].prompt
    assert {CRITIC.reply(prompt, (said,), 5) for said in ("right", "wrong")} == {CRITIC.reply(prompt, (), 5)}
    heard = []
    played(frame=lambda text: heard.append(text) or FRAME)
    assert heard[0] == heard[1]
    assert heard[2] == heard[3]
    every = {CRITIC.reply(prompt, (), seed) for seed in range(9)}
    assert every == {message for messages in ATTITUDES.values() for message in messages}


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="turn 2 of 'a' has 6 tokens"):
        played(max_new_tokens=58)
    with pytest.raises(ValueError, match="has 300 tokens with its frame, at most 256"):
        played(frame=lambda text: [1] * 300)


class Judge:
    """1 for texts that end in an even number, 0 for others."""

    def score(self, groups):
        rewards = [[float(r.text[-1:] in "02468") for r in group.rollouts] for group in groups]
        return [Verdicts(rewards_G=np.array(r, np.float32), statuses_G=("ok",) * len(r)) for r in rewards]


def test_every_turn_is_judged_by_itself():
    whole = played()
    verdicts = score(Judge(), whole)
    assert [v.turn_rewards_GK.tolist() for v in verdicts] == [[[0, 1], [0, 1]], [[0, 1], [0, 0]]]
    assert [v.rewards_G.tolist() for v in verdicts] == [[1, 1], [1, 0]]
    turns = turns_of(whole[0], verdicts[0])
    assert turns.rewards_GK.tolist() == [[0, 1], [0, 1]]
    assert turns.lengths_GK.tolist() == [[2, 2], [3, 2]]
    assert turns.texts_GK == (("first", "said 6"), ("first", "said 8"))
    single = score(Judge(), groups())
    assert [v.turn_rewards_GK for v in single] == [None, None]
    assert turns_of(groups()[0], single[0]) is None


class Tokenizer:
    """Characters; a template in the usual manner."""

    def __init__(self, drops_answers=False):
        self.drops_answers = drops_answers

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        kept = [m for m in messages if m["role"] == "user" or not self.drops_answers]
        return "".join(f"<{m['role'][0]}>{m['content']}<e>" for m in kept) + "<a>"

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(c) for c in text]}


def framed(template: str, tokenizer: Tokenizer, **data) -> str:
    config = DataConfig(train=SourceConfig(kind="task", name="addition"), template=template, **data)
    return "".join(map(chr, turn_frame(config, tokenizer)("why?")))


def test_frame_is_what_the_template_writes_between_two_answers():
    assert framed("chat", Tokenizer()) == "<e><u>why?<e><a>"
    assert framed("chat", Tokenizer(), system_prompt="be brief") == "<e><u>why?<e><a>"
    assert framed("plain", Tokenizer()) == "\nwhy?\n"
    with pytest.raises(ValueError, match="cannot hold a conversation of several turns"):
        framed("chat", Tokenizer(drops_answers=True))


def test_words_that_the_tokenizer_lacks_are_a_readable_error():
    class Narrow(Tokenizer):
        def __call__(self, text, add_special_tokens):
            raise Exception("no such word")

    with pytest.raises(ValueError, match="cannot encode a user's turn, 'why"):
        framed("plain", Narrow())


class SlowEngine(Engine):
    """Some answers are much longer than others, and reach the limit."""

    def generate(self, requests, sampling):
        self.asked.append(list(requests))
        return [
            Sample(
                token_ids=np.arange(1 + 4 * (n % 2)),
                logprobs=np.full(1 + 4 * (n % 2), -0.5, np.float32),
                finish_reason="length",
                versions_T=np.full(1 + 4 * (n % 2), 4, np.int32),
            )
            for n in range(len(requests))
        ]


def test_every_conversation_that_was_started_is_whole():
    """However long its answers are: no group loses a row, no row is padded, and the slow ones are trained too."""
    engine = SlowEngine()
    whole = played(engine)
    assert [len(group.rollouts) for group in whole] == [len(group.rollouts) for group in groups()]
    assert len(engine.asked) == 1
    for group, before in zip(whole, groups(), strict=True):
        for n, (one, first) in enumerate(zip(group.rollouts, before.rollouts, strict=True)):
            assert len(one.turns) == CRITIC.num_turns
            assert one.trained_T.sum() == len(first.token_ids) + 1 + 4 * (n % 2)


def test_conversations_of_an_evaluation_have_random_numbers_of_their_own():
    training, evaluation = Engine(), Engine()
    played(training)
    played(evaluation, stream="evaluate")
    seeds = [{r.seed for r in engine.asked[0]} for engine in (training, evaluation)]
    assert not seeds[0] & seeds[1]

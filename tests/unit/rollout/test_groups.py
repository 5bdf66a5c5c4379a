import numpy as np
import pytest

from megatron_gcpo.rollout import Sample, Sampling, generate_groups
from megatron_gcpo.seeds import derive_seed
from megatron_gcpo.types import Prompt


class EchoEngine:
    """Answers every request with its prompt and seed, and remembers the requests."""

    policy_version = 3
    max_positions = 20

    def __init__(self):
        self.requests = []

    def generate(self, requests, sampling):
        self.requests += requests
        return [
            Sample(
                token_ids=np.array([r.prompt_token_ids[0], r.seed % 1000]),
                logprobs=np.zeros(2, np.float32),
                finish_reason="length",
                versions_T=np.full(2, 3, np.int32),
            )
            for r in requests
        ]


def prompt(name, num_tokens=2):
    return Prompt(id=name, token_ids=(ord(name[0]),) * num_tokens, text="", answer="")


def run(engine, prompts, **changes):
    options = {"group_size": 3, "max_new_tokens": 10, "run_seed": 7, "step": 5} | changes
    return generate_groups(engine, prompts, sampling=Sampling(), decode=lambda ids: " ".join(map(str, ids)), **options)


def test_groups_keep_the_order_and_seeds_derive_from_prompt_and_sample():
    engine = EchoEngine()
    groups = run(engine, [prompt("b"), prompt("a")])
    assert [group.prompt.id for group in groups] == ["b", "a"]
    expected = [derive_seed(7, "rollout", 5, name, s) for name in "ba" for s in range(3)]
    assert [request.seed for request in engine.requests] == expected
    assert len(set(expected)) == 6
    rollout = groups[1].rollouts[2]
    assert rollout.text == f"{ord('a')} {expected[5] % 1000}"
    assert (rollout.finish_reason, rollout.policy_version) == ("length", 3)


def test_sharing_prompts_among_replicas_changes_no_seed():
    together, apart = EchoEngine(), EchoEngine()
    run(together, [prompt("a"), prompt("b")])
    run(apart, [prompt("b")])
    assert apart.requests == together.requests[3:]


def test_another_step_or_stream_draws_other_seeds():
    engine = EchoEngine()
    for changes in ({}, {"step": 6}, {"stream": "evaluate"}, {"run_seed": 8}):
        run(engine, [prompt("a")], **changes)
    assert len({request.seed for request in engine.requests}) == 12


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_generated():
    engine = EchoEngine()
    with pytest.raises(ValueError, match=r"prompt 'long' has 12 tokens.*20 positions.*max_new_tokens to 8"):
        run(engine, [prompt("a"), prompt("long", 12)])
    with pytest.raises(ValueError, match="prompt 'none' has no tokens"):
        run(engine, [prompt("none", 0)])
    assert engine.requests == []


def test_a_prompt_id_that_occurs_twice_is_refused():
    with pytest.raises(ValueError, match=r"\['a'\] occur more than once.*id_column"):
        run(EchoEngine(), [prompt("a"), prompt("a")])

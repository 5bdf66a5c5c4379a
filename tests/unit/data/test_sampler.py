import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gcpo.data import PromptSampler, RowSampler
from megatron_gcpo.data import sampler as module


@st.composite
def samplers(draw):
    replicas = draw(st.integers(1, 4))
    per_step = replicas * draw(st.integers(1, 6))
    num_prompts = draw(st.integers(per_step, 3 * per_step + 7))
    return PromptSampler(
        num_prompts=num_prompts, prompts_per_step=per_step, seed=draw(st.integers(0, 5)), num_replicas=replicas
    )


@settings(deadline=None, max_examples=60)
@given(samplers())
def test_every_epoch_takes_every_prompt_once_and_no_step_repeats_one(sampler):
    epochs = 2 * sampler.prompts_per_step + 1
    steps = math.ceil(epochs * sampler.num_prompts / sampler.prompts_per_step)
    line = []
    for step in range(steps):
        taken = sampler.select(step)
        assert len(set(taken)) == len(taken) == sampler.prompts_per_step
        line += taken
    everything = list(range(sampler.num_prompts))
    for epoch in range(epochs):
        assert sorted(line[epoch * sampler.num_prompts : (epoch + 1) * sampler.num_prompts]) == everything


@settings(deadline=None, max_examples=40)
@given(samplers(), st.integers(0, 300), st.integers(0, 3))
def test_resume_equals_the_uninterrupted_run(sampler, step, round_):
    """A fresh process that starts at any step takes what a process takes that came all the way."""
    uninterrupted = [sampler.select(s, round_) for s in range(step + 1)]
    module._epoch_order.cache_clear()
    module._plain_order.cache_clear()
    fresh = PromptSampler(num_prompts=sampler.num_prompts, prompts_per_step=sampler.prompts_per_step, seed=sampler.seed)
    taken = fresh.select(step, round_)
    # a round that runs short is cut to a multiple of the replicas
    assert taken[: len(uninterrupted[-1])] == uninterrupted[-1]
    assert len(taken) - len(uninterrupted[-1]) < sampler.num_replicas


@settings(deadline=None, max_examples=50)
@given(samplers(), st.integers(0, 50), st.integers(0, 2))
def test_replicas_partition_the_step(sampler, step, round_):
    whole = sampler.select(step, round_)
    shares = [sampler.share(step, replica, round_) for replica in range(sampler.num_replicas)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(sum(shares, ())) == sorted(whole)


@settings(deadline=None, max_examples=50)
@given(samplers(), st.integers(0, 50))
def test_refill_rounds_never_collide_and_use_up_the_prompts(sampler, step):
    rounds, taken = 0, []
    while chunk := sampler.select(step, rounds):
        taken += chunk
        rounds += 1
    assert len(set(taken)) == len(taken)
    assert sampler.num_prompts - len(taken) < sampler.num_replicas
    assert not sampler.select(step, rounds + 5)


def test_order_differs_by_epoch_seed_and_step():
    a = PromptSampler(num_prompts=100, prompts_per_step=100, seed=0)
    b = PromptSampler(num_prompts=100, prompts_per_step=100, seed=1)
    assert len({a.select(0), a.select(1), a.select(2), b.select(0), tuple(range(100))}) == 5
    c = PromptSampler(num_prompts=100, prompts_per_step=10, seed=0)
    assert c.select(0, 1) != c.select(1, 1)
    assert c.epoch(25) == 2.5


def test_refuses_what_cannot_work_and_names_what_does():
    with pytest.raises(ValueError, match=r"prompts_per_step 10 .* by 4 data-parallel replicas: use 8 or 12"):
        PromptSampler(num_prompts=100, prompts_per_step=10, seed=0, num_replicas=4)
    with pytest.raises(ValueError, match=r"prompts_per_step 2 .* by 4 data-parallel replicas: use 4$"):
        PromptSampler(num_prompts=100, prompts_per_step=2, seed=0, num_replicas=4)
    with pytest.raises(ValueError, match=r"16 exceeds the 9 prompts of data\.train.* use at most 9"):
        PromptSampler(num_prompts=9, prompts_per_step=16, seed=0)
    with pytest.raises(ValueError, match=r"sft_rows_per_step 9 .* use 8 or 10"):
        RowSampler(weights_P=[[1.0]], rows_per_step=9, seed=0, num_replicas=2)


def test_rows_visit_prompts_by_epoch_and_demonstrations_by_weight():
    """400 epochs over 5 prompts: each prompt once per epoch; demonstration shares within 5 sigma of their weights."""
    weights = [(1.0,), (1.0, 1.0), (0.0, 1.0, 3.0), (2.0, 0.0), (0.5, 0.25, 0.25)]
    sampler = RowSampler(weights_P=weights, rows_per_step=20, seed=3, num_replicas=2)
    rows = [row for step in range(100) for row in sampler.select(step)]
    for epoch in range(400):
        assert sorted(prompt for prompt, _ in rows[epoch * 5 : epoch * 5 + 5]) == [0, 1, 2, 3, 4]
    counts = Counter(rows)
    for prompt, own in enumerate(weights):
        for index, weight in enumerate(own):
            share = weight / sum(own)
            sigma = math.sqrt(400 * share * (1 - share))
            assert abs(counts[prompt, index] - 400 * share) <= 5 * sigma
            assert share > 0 or counts[prompt, index] == 0


def test_rows_are_a_function_of_the_step_and_split_among_replicas():
    sampler = RowSampler(weights_P=[(1.0, 1.0)] * 7, rows_per_step=6, seed=0, num_replicas=3)
    again = RowSampler(weights_P=[(1.0, 1.0)] * 7, rows_per_step=6, seed=0)
    for step in (5, 0, 3):
        assert sampler.select(step) == again.select(step)
        shares = [sampler.share(step, replica) for replica in range(3)]
        assert sorted(sum(shares, ())) == sorted(sampler.select(step))
    assert sampler.select(0) != sampler.select(7)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "no prompts"),
        (
            [(1.0,), ()],
            "prompt 1 of data.train has no demonstration for stage sft: set data.train.demonstration_column",
        ),
        ([(0.0, 0.0)], "not all 0"),
        ([(1.0, -1.0)], ">= 0"),
        ([(float("nan"),)], "finite"),
    ],
)
def test_rows_refuse_unusable_demonstrations(weights, message):
    with pytest.raises(ValueError, match=message):
        RowSampler(weights_P=weights, rows_per_step=4, seed=0)

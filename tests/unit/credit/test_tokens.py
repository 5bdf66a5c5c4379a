"""From rollouts to tokens: every completion token, and no other, carries the advantage of its own rollout."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_gcpo.credit.tokens import completions, demonstration_batch, probe_batch, rollout_batch
from megatron_gcpo.types import Credit, Group, Prompt, Rollout

LENGTHS = st.lists(  # per group: the prompt's length and its completions'
    st.tuples(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=2, max_size=4)), max_size=4
)


def groups_of(lengths: list[tuple[int, list[int]]]) -> tuple[list[Group], list[Credit]]:
    """Groups in which all tokens, log-probs and advantages differ, so that none can stand for another."""
    counter = iter(range(10, 10_000))
    groups, credits = [], []
    for p, (prompt_length, answers) in enumerate(lengths):
        rollouts = []
        for length in answers:
            tokens = np.array([next(counter) for _ in range(length)])
            rollouts.append(
                Rollout(
                    token_ids=tokens,
                    logprobs=(-tokens / 7).astype(np.float32),
                    text="",
                    finish_reason="stop",
                    versions_T=np.zeros(len(tokens), np.int32),
                )
            )
        prompt = tuple(next(counter) for _ in range(prompt_length))
        groups.append(Group(prompt=Prompt(id=str(p), token_ids=prompt, text="", answer=""), rollouts=tuple(rollouts)))
        advantages_G = torch.tensor([next(counter) / 3 for _ in answers], dtype=torch.float64)
        credits.append(Credit(credits_G=advantages_G, advantages_G=advantages_G))
    return groups, credits


@given(LENGTHS)
def test_every_completion_token_carries_its_rollout_s_advantage(lengths: list[tuple[int, list[int]]]) -> None:
    groups, credits = groups_of(lengths)
    batch = rollout_batch(groups, credits)
    assert batch.rollout_logprobs_T is not None
    flat = [(g, i) for g, group in enumerate(groups) for i in range(len(group.rollouts))]
    assert batch.num_rows == len(flat)
    assert batch.group_N.tolist() == [g for g, _ in flat]
    for n, (g, i) in enumerate(flat):
        prompt, rollout = groups[g].prompt.token_ids, groups[g].rollouts[i]
        row = slice(int(batch.cu_seqlens_N1[n]), int(batch.cu_seqlens_N1[n + 1]))
        off, on = [0.0] * len(prompt), len(rollout.token_ids)
        assert batch.tokens_T[row].tolist() == [*prompt, *rollout.token_ids]
        assert batch.mask_T[row].tolist() == off + [1.0] * on
        assert batch.advantages_T[row].tolist() == off + [float(np.float32(credits[g].advantages_G[i]))] * on
        assert batch.rollout_logprobs_T[row].tolist() == off + rollout.logprobs.tolist()
    assert int(batch.cu_seqlens_N1[-1]) == len(batch.tokens_T)
    for group, cut in zip(groups, completions(groups, batch.tokens_T), strict=True):
        assert [own.tolist() for own in cut] == [list(rollout.token_ids) for rollout in group.rollouts]
    assert (batch.tokens_T.dtype, batch.mask_T.dtype, batch.advantages_T.dtype, batch.group_N.dtype) == (
        torch.int64,
        torch.float32,
        torch.float32,
        torch.int64,
    )


def test_no_groups_are_a_batch_without_rows() -> None:
    """A replica whose groups were all filtered out still takes part in the update."""
    batch = rollout_batch([], [])
    assert batch.num_rows == 0
    assert batch.cu_seqlens_N1.tolist() == [0]
    assert len(batch.tokens_T) == len(batch.group_N) == 0
    assert batch.rows([]).num_rows == 0


def test_demonstrations_are_rows_of_their_own_with_advantage_one() -> None:
    batch = demonstration_batch([((1, 2), [3, 4]), ((5,), [6])])
    assert batch.tokens_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.mask_T.tolist() == batch.advantages_T.tolist() == [0, 0, 1, 1, 0, 1]
    assert batch.group_N.tolist() == [0, 1]


def test_a_probe_is_the_first_rollout_of_the_first_groups() -> None:
    groups, _ = groups_of([(2, [1, 2]), (1, [3, 1]), (3, [2, 2])])
    probe = probe_batch(groups, num_rows=2)
    assert probe.num_rows == 2
    assert probe.tokens_T.tolist() == [
        *groups[0].prompt.token_ids,
        *groups[0].rollouts[0].token_ids,
        *groups[1].prompt.token_ids,
        *groups[1].rollouts[0].token_ids,
    ]


def routed_rollout(tokens: int, prompt: int, first: int | None) -> Rollout:
    """Routing of 3 layers to 2 experts, every number different; None: not recorded."""
    numbers = None if first is None else np.arange(first, first + (prompt + tokens) * 6, dtype=np.int16)
    return Rollout(
        token_ids=np.arange(tokens),
        logprobs=np.zeros(tokens, np.float32),
        text="",
        finish_reason="stop",
        versions_T=np.zeros(tokens, np.int32),
        routed_experts=None if numbers is None else numbers.reshape(prompt + tokens, 3, 2),
    )


def test_routing_travels_with_its_tokens() -> None:
    """Row after row as the engine recorded it, unknown for a rollout that no engine drew; rows() takes it along."""
    prompt = Prompt(id="a", token_ids=(7, 8), text="", answer="")
    group = Group(prompt=prompt, rollouts=tuple(routed_rollout(*r) for r in ((3, 2, 0), (1, 2, None), (2, 2, 500))))
    zeros_G = torch.zeros(3, dtype=torch.float64)
    batch = rollout_batch([group], [Credit(credits_G=zeros_G, advantages_G=zeros_G)])
    assert batch.routed_experts_T is not None
    assert batch.routed_experts_T.shape == (len(batch.tokens_T), 3, 2)
    assert batch.routed_experts_T.dtype == torch.int16
    expected = [group.rollouts[0].routed_experts, np.full((3, 3, 2), -1), group.rollouts[2].routed_experts]
    np.testing.assert_array_equal(batch.routed_experts_T, np.concatenate(expected))
    np.testing.assert_array_equal(batch.rows([2, 0]).routed_experts_T, np.concatenate([expected[2], expected[0]]))


def test_without_recorded_routing_there_is_none() -> None:
    groups, credits = groups_of([(2, [1, 2])])
    assert rollout_batch(groups, credits).routed_experts_T is None
    assert rollout_batch([], []).routed_experts_T is None

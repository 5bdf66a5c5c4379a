"""A second stream of rows beside the policy's: one update, two losses, and neither sees the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_gcpo.credit.tokens import rollout_batch
from megatron_gcpo.loss import count, token_weights
from megatron_gcpo.loss.streams import beside, reinforced
from megatron_gcpo.types import Credit, Group, TokenBatch
from tests.unit.methods.world import MAX_TOKENS, chosen, make_world, scored_batch, statistics, take_step

WORLD = make_world()
JUDGED = make_world([[0.0]] * 3, seed=4)
ADVANTAGES = (0.75, -0.25, 0.5)
METHODS = ("metis", "gcpo", "gspo", "conspo", "lead", "rspo", "papo", "cispo")


def stream(reduce: str) -> TokenBatch:
    """Judgements as rows: a group each, with weights of their own."""
    groups = [Group(prompt=g.prompt, rollouts=g.rollouts) for g in JUDGED.groups]
    credits = [Credit(credits_G=torch.tensor([a]), advantages_G=torch.tensor([a])) for a in ADVANTAGES]
    batch = rollout_batch(groups, credits)
    batch = replace(batch, old_logprobs_T=statistics(WORLD.start, batch).logprobs_T)
    return replace(batch, weights_T=token_weights(batch, count(batch), reduce, MAX_TOKENS))


def gradient(name: str, batch: TokenBatch, rows: list[list[int]] | None = None) -> torch.Tensor:
    """Of the method's loss and REINFORCE on the marked rows, as a run computes it."""
    method, options = chosen(name)
    current = WORLD.current.clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for part in [batch] if rows is None else [batch.rows(r) for r in rows]:
        stats = statistics(current, part)
        loss_T, _ = method.token_loss(stats, part, options)
        loss = loss + (part.weights_T.double() * reinforced(loss_T, stats, part)).sum()
    return torch.autograd.grad(loss, current)[0]


def judge_gradient(reduce: str) -> torch.Tensor:
    """Of the direct objective: minus the mean of A log pi over the stream, in the reduction's sense."""
    batch = stream(reduce)
    current = WORLD.current.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    lengths = [len(g.rollouts[0].token_ids) for g in JUDGED.groups]
    for n, advantage in enumerate(ADVANTAGES):
        own = batch.rows([n])
        logp = (statistics(current, own).logprobs_T * own.mask_T).sum()
        scale = {
            "token_mean": sum(lengths),
            "sequence_mean_token_mean": 3 * lengths[n],
            "sequence_mean_fixed_length": 3 * MAX_TOKENS,
            "prompt_balanced": 3 * lengths[n],
        }[reduce]
        total = total - advantage * logp / scale
    return torch.autograd.grad(total, current)[0]


@pytest.mark.parametrize("name", METHODS)
def test_gradient_is_that_of_the_policy_loss_plus_coef_times_reinforce(name):
    taken = take_step(name, WORLD)
    reduce = chosen(name)[1].loss.reduce
    both = gradient(name, beside(taken.batch, stream(reduce), 0.3))
    torch.testing.assert_close(both, taken.gradient + 0.3 * judge_gradient(reduce), rtol=1e-6, atol=1e-8)
    assert judge_gradient(reduce).abs().max() > 1e-3


@pytest.mark.parametrize("name", METHODS)
def test_coef_0_leaves_the_gradient_of_the_policy_unchanged_to_the_last_bit(name):
    taken = take_step(name, WORLD)
    both = beside(taken.batch, stream(chosen(name)[1].loss.reduce), 0.0)
    assert torch.equal(gradient(name, both), taken.gradient)


@pytest.mark.parametrize(
    "reduce", ["token_mean", "sequence_mean_token_mean", "sequence_mean_fixed_length", "prompt_balanced"]
)
def test_the_stream_has_its_own_mean(reduce):
    """The weights of the policy's rows know nothing of the stream's, and the other way round."""
    taken = take_step("metis", WORLD, loss={"reduce": reduce})
    both = beside(taken.batch, stream(reduce), 1.0)
    assert torch.equal(both.weights_T[: len(taken.batch.tokens_T)], taken.batch.weights_T)
    torch.testing.assert_close(gradient("metis", both), taken.gradient + judge_gradient(reduce), rtol=1e-6, atol=1e-8)


def test_micro_batches_do_not_matter():
    taken = take_step("metis", WORLD)
    both = beside(taken.batch, stream("token_mean"), 0.3)
    order = torch.randperm(both.num_rows, generator=torch.Generator().manual_seed(0)).tolist()
    cut = gradient("metis", both, [order[:5], [], order[5:7], order[7:]])
    torch.testing.assert_close(cut, gradient("metis", both), rtol=1e-12, atol=1e-14)


def test_rows_keep_their_order_and_their_groups():
    method, options = chosen("metis")
    batch, _ = scored_batch(method, options, WORLD)
    batch = replace(batch, weights_T=batch.mask_T.clone(), old_kl_coef_T=torch.ones(len(batch.mask_T)))
    side = stream("token_mean")
    both = beside(batch, side, 1.0)
    rows, tokens = batch.num_rows, len(batch.tokens_T)
    assert both.num_rows == rows + 3
    assert torch.equal(both.tokens_T[tokens:], side.tokens_T)
    assert both.group_N.tolist() == [*batch.group_N.tolist(), 4, 5, 6]
    assert both.old_kl_coef_T[tokens:].tolist() == [0.0] * len(side.tokens_T)
    assert both.reinforce_T.tolist() == [False] * tokens + [True] * len(side.tokens_T)
    assert both.rows(range(rows)).tokens_T.equal(batch.tokens_T)


def test_either_may_have_no_rows():
    taken, side = take_step("metis", WORLD).batch, stream("token_mean")
    nothing = replace(rollout_batch([], []), weights_T=torch.zeros(0), old_logprobs_T=torch.zeros(0))
    assert torch.equal(gradient("metis", beside(taken, nothing, 1.0)), gradient("metis", taken))
    alone = beside(nothing, side, 1.0)
    torch.testing.assert_close(gradient("metis", alone), judge_gradient("token_mean"), rtol=1e-6, atol=1e-8)


def test_experts_of_one_stream_are_unknown_for_the_other():
    side = stream("token_mean")
    routed_Tlk = torch.ones(len(side.tokens_T), 2, 1, dtype=torch.int16)
    taken = take_step("metis", WORLD).batch
    both = beside(taken, replace(side, routed_experts_T=routed_Tlk), 1.0)
    assert np.unique(both.routed_experts_T[: len(taken.tokens_T)]).tolist() == [-1]
    assert both.routed_experts_T[len(taken.tokens_T) :].equal(routed_Tlk)

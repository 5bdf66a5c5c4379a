"""What lead, bet, vigor, ed_grpo and ed_idpo promise beyond the contract: their rules at the points that define them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gcpo.loss.rows import row_means
from megatron_gcpo.methods import bet, ed_idpo, lead, recrit, resolve, vigor
from megatron_gcpo.methods.exploration import push
from megatron_gcpo.methods.phase import alone
from megatron_gcpo.types import Turns
from tests.unit.methods.test_credit import advantages, inputs
from tests.unit.methods.world import chosen, make_world, scored_batch, take_step

LIMIT = 1000


class TestLead:
    def test_length_reward(self):
        """Symmetric about L*, 1 there, -1 from twice as long on; L* is the mean of the correct ones within its bounds."""
        _, options = resolve({"name": "lead"})
        lengths_G = torch.tensor([2000, 2000, 1000, 3000, 4000, 9000, 0])
        correct_G = torch.tensor([True, True, False, False, False, False, False])
        assert lead.length_rewards(lengths_G, correct_G, options).tolist() == [1, 1, 0.5, 0.5, 0, -1, 0]
        none_G = torch.zeros(2, dtype=torch.bool)
        assert lead.length_rewards(torch.tensor([8000, 4000]), none_G, options).tolist() == [1, 0.5]
        assert lead.length_rewards(torch.tensor([10, 20]), ~none_G, options).tolist() == pytest.approx([0.01, 0.02])

    def weights(self, rewards, states=None, **section):
        world = make_world(rewards, seed=1)
        taken = take_step("lead", world, states=states, **section)
        return taken.metrics["lead_correctness_weight"], taken.states

    def test_weight_moves_to_length_as_everything_becomes_correct_but_not_below_the_floor(self):
        some = self.weights([[1, 0, 0, 1], [0, 1, 0, 1]])[0]
        most = self.weights([[1, 1, 1, 1], [1, 1, 1, 0]])[0]
        every = self.weights([[1, 1, 1, 1], [1, 1, 1, 1]], states={"method": {"correctness": 0.1}})[0]
        assert some > most
        assert every == 0.3

    def test_the_average_goes_on_where_it_was(self):
        """One step with the memory of another is 0.95 x the old weight + what a step without memory adds."""
        fresh, _ = self.weights([[1, 0, 1, 0], [1, 1, 1, 0]])
        later, states = self.weights([[1, 0, 1, 0], [1, 1, 1, 0]], states={"method": {"correctness": 0.9}})
        assert later == pytest.approx(fresh + 0.95 * (0.9 - 0.5))
        assert states["method"]["correctness"] == later

    def test_nothing_is_learned_of_the_weights_while_nothing_is_correct(self):
        assert self.weights([[0, 0, 0], [0, 0, 0]])[0] == 0.5

    def test_advantages_are_white(self):
        batch = take_step("lead", make_world()).batch
        own_T = batch.advantages_T[batch.mask_T > 0].double()
        assert own_T.mean().item() == pytest.approx(0, abs=1e-6)
        assert own_T.std(correction=0).item() == pytest.approx(1, abs=1e-5)


class TestBet:
    """The rules of the paper, for all lengths and predictions."""

    def test_reads_the_protocol(self):
        text = "<predict>solvability: 0.7, budget: .25</predict> hm \\boxed{\\text{Unsolvable}}."
        assert bet.read(text) == bet.Said(solvability=0.7, budget=0.25, folds=True, boxed=True)
        assert bet.read("<PREDICT> Solvability = 1 budget=0.5 </predict>\\boxed{7}").solvability == 1
        for bad in ("", "<predict>solvability: 1.7, budget: 0.1</predict>", "<predict>solvability: 0.1</predict>"):
            assert bet.read(bad).solvability is None
        late = "x" * 400 + "<predict>solvability: 0.7, budget: .25</predict>"
        assert bet.read(late).budget is None

    @settings(max_examples=50, deadline=None)
    @given(st.text(max_size=80) | st.from_regex(r"<predict>(solvability|[ :.0-9,]|budget){0,9}</predict>"))
    def test_reading_is_total(self, text):
        assert isinstance(bet.read(text), bet.Said)

    @given(st.integers(1, 5000))
    def test_folding_beats_failing_only_where_nobody_succeeds(self, length):
        failed = bet.value(length, False, False, False, LIMIT)
        assert bet.value(9, False, True, False, LIMIT) > failed
        assert bet.value(9, False, True, True, LIMIT) < failed
        assert -0.2 <= failed <= 0

    @given(st.integers(1, 5000), st.integers(1, 5000), st.floats(0.3, 1), st.integers(1, 900))
    def test_a_shorter_correct_answer_never_earns_less(self, a, b, share, best):
        short, long = sorted((a, b))
        assert bet.efficiency(short, True, share, best) >= bet.efficiency(long, True, share, best)

    def test_a_lone_success_may_be_long(self):
        assert bet.efficiency(10, True, 0.25, 100.0) == 0
        assert bet.efficiency(10, True, 0.26, 100.0) == pytest.approx(0.27)
        assert bet.efficiency(10, False, 0.5, 100.0) == 0

    def test_asking_for_too_little_costs_twice_as_much(self):
        def cost(budget):
            said = bet.Said(solvability=0.5, budget=budget, folds=False, boxed=True)
            return bet.calibration(said, 0.5, 500.0, LIMIT)

        assert cost(0.5) == 0
        assert cost(0.4) == pytest.approx(2 * cost(0.6)) == pytest.approx(-0.04)

    def test_an_unsolvable_problem_should_look_like_one(self):
        said = bet.Said(solvability=0.9, budget=0.6, folds=False, boxed=True)
        assert bet.calibration(said, 0.0, None, LIMIT) == pytest.approx(-0.24)
        missing = replace(said, solvability=None, budget=None)
        assert bet.calibration(missing, 0.0, None, LIMIT) == pytest.approx(-0.15)

    @pytest.mark.parametrize(("count", "kept"), [(1, 1), (3, 1), (4, 2), (7, 3), (10, 3)])
    def test_the_budget_is_set_by_the_shortest_three_tenths(self, count, kept):
        lengths_G = torch.arange(1, 13)
        correct_G = lengths_G > 12 - count
        assert bet.shortest_correct(lengths_G, correct_G) == np.mean(range(13 - count, 13 - count + kept))
        assert bet.shortest_correct(lengths_G, lengths_G < 0) is None

    def test_a_group(self):
        """Half correct; c* is the shortest correct one, 100 of 1000 tokens: 0.3 for nothing, all else by hand."""
        said = "<predict>solvability: 0.5, budget: 0.1</predict>"
        texts = (said + "\\boxed{1}", "\\boxed{1}", said + "\\boxed{unsolvable}", "lost")
        given_inputs = replace(inputs([1.0, 1.0, 0.0, 0.0], lengths_G=[100, 400, 20, 500]), texts_G=texts)
        _, options = resolve({"name": "bet", "max_tokens": 1000})
        credit = bet.credit(given_inputs, options)
        assert credit.credits_G.tolist() == pytest.approx([1.1, 1 - 0.08, -0.8 + 0.1, -0.1 - 0.08])
        assert credit.metrics == {"fold_share": 0.25, "predicted_share": 0.5}

    def test_a_word_in_a_box_that_is_right_is_no_fold(self):
        given_inputs = replace(inputs([1.0, 0.0]), texts_G=("\\boxed{Unsolvable}", ""))
        assert bet.credit(given_inputs, bet.BetOptions()).credits_G[0] > 0.5


class TestVigor:
    def test_ranks(self):
        scores_G = torch.tensor([-3.0, -1.0, -2.0, -2.0, -9.0]).double()
        assert vigor.ranks(scores_G).tolist() == [-0.5, 1, 0.25, 0.25, -1]
        assert vigor.ranks(scores_G.exp()).tolist() == vigor.ranks(scores_G).tolist()
        assert vigor.ranks(torch.ones(1).double()).tolist() == [0]

    def test_rewards_are_not_read(self):
        world = make_world()
        other = world.rewarded([[1 - x for x in r] for r in world.rewards])
        assert torch.equal(take_step("vigor", world).gradient, take_step("vigor", other).gradient)

    def test_the_gradient_that_moves_the_policy_least_is_paid_most(self):
        world = make_world([[0, 0, 0]], lengths=lambda rng: 4)
        batch, _ = scored_batch(*chosen("vigor"), world)
        size_T = torch.tensor([4.0, 1.0, 9.0])[torch.arange(3).repeat_interleave(batch.lengths_N)] * batch.mask_T
        method, options = chosen("vigor")
        _, stats = scored_batch(method, options, world)
        taken = vigor.prepare(batch, replace(stats, head_gram_T=size_T), options, {}, alone())
        paid_N = row_means(taken.batch.advantages_T, batch)
        assert paid_N.argsort().tolist() == [2, 0, 1]
        assert taken.metrics["vigor_gradient"] == pytest.approx(2, rel=1e-3)  # (2 + 1 + 3) / 3

    def test_numbers_that_differ_in_rounding_are_the_same_score(self):
        world = make_world([[0, 0]], lengths=lambda rng: 4)
        method, options = chosen("vigor")
        batch, stats = scored_batch(method, options, world)
        gram_T = batch.mask_T * 5.3
        gram_T[-1] *= 1 + 1e-6
        taken = vigor.prepare(batch, replace(stats, head_gram_T=gram_T), options, {}, alone())
        assert (taken.batch.advantages_T == 0).all()


class TestExploration:
    @pytest.mark.parametrize("name", ["ed_grpo", "ed_idpo"])
    def test_without_weight_it_is_not_there(self, name):
        world = make_world(drift=0.0)
        plain, moved = (take_step(name, world, alpha=a).gradient for a in (0.0, 0.3))
        assert (plain - moved).abs().max() > 1e-4
        if name == "ed_grpo":
            torch.testing.assert_close(plain, take_step("grpo", world).gradient)

    def test_in_the_mean_it_lowers_what_the_reference_would_say(self):
        """Four answers of one token: sum_y pi(y) (ref(y) / pi(y) - 1) (e_y - pi) = ref - pi, for any pi and ref; and 0
        where both are the same."""
        g = torch.Generator().manual_seed(0)
        logits, reference = torch.randn(2, 4, generator=g).double()
        for ref in (reference, logits):
            pi, rho = logits.softmax(-1), ref.softmax(-1)
            world = make_world([[0.0] * 4], lengths=lambda rng: 1, drift=0.0)
            method, options = resolve({"name": "ed_grpo"})
            batch, stats = scored_batch(method, options, world)
            last_N = batch.cu_seqlens_N1[1:] - 1
            own_T, ref_T = (torch.zeros(len(batch.tokens_T)).double() for _ in range(2))
            own_T[last_N], ref_T[last_N] = pi.log(), rho.log()
            pushes_N = push(replace(batch, ref_logprobs_T=ref_T), replace(stats, logprobs_T=own_T), 1e9)
            mean = (pi * pushes_N) @ (torch.eye(4).double() - pi)
            torch.testing.assert_close(mean, rho - pi, rtol=0, atol=1e-12)

    def test_a_right_answer_that_the_reference_rarely_gives_is_learned_sooner(self):
        """Exact gradients on a bandit that starts at the reference: the push adds to what rewards began."""

        def reached(alpha):
            start = torch.tensor([2.0, 0.0, 0.0, -1.0]).double()
            reward, logits = torch.tensor([0.0, 0.0, 0.0, 1.0]).double(), start.clone()
            for _ in range(60):
                pi = logits.softmax(-1)
                advantage = reward - (pi * reward).sum() - alpha * ((start.softmax(-1) / pi).clamp(max=5) - 1)
                logits = logits + 0.3 * (pi * advantage) @ (torch.eye(4).double() - pi)
            return logits.softmax(-1)[3].item()

        assert reached(0.1) > reached(0.0) + 0.01

    def test_long_shots_are_truncated(self):
        world = make_world(drift=0.0)
        batch, stats = scored_batch(*chosen("ed_grpo"), world)
        far = replace(batch, ref_logprobs_T=batch.ref_logprobs_T + 100 * batch.mask_T)
        assert (push(far, stats, 5.0) == 4).all()


class TestPreferences:
    def test_at_zero_margin(self):
        """Loss log 2, and each of the K x J pairs pulls beta / 2."""
        positive_G = torch.tensor([True, False, True, False, False])
        c_G = ed_idpo.coefficients(torch.zeros(5).double(), positive_G, 0.4)
        assert c_G.tolist() == pytest.approx([-0.1, 0.2 / 3, -0.1, 0.2 / 3, 0.2 / 3])

    @given(st.lists(st.floats(-3, 3), min_size=2, max_size=6), st.floats(0.05, 3))
    @settings(max_examples=30, deadline=None)
    def test_gradient_of_the_loss(self, scores, beta):
        s_G = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
        positive_G = torch.arange(len(scores)) % 2 == 0
        pairs = itertools.product(s_G[positive_G], s_G[~positive_G])
        loss = torch.stack([-torch.nn.functional.logsigmoid(beta * (a - b)) for a, b in pairs]).mean()
        (expected,) = torch.autograd.grad(loss, s_G)
        got = ed_idpo.coefficients(s_G.detach(), positive_G, beta)
        torch.testing.assert_close(got, expected)
        assert got.sum().item() == pytest.approx(0, abs=1e-12)

    def test_loss_at_zero_margin_is_log_2(self):
        world = make_world([[1, 0]], drift=0.0)
        same = replace(world, reference=world.start)
        from tests.unit.methods.direct import objective

        assert objective("ed_idpo", same, same.current, 0.0).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("name", ["lead", "bet", "vigor", "recrit"])
def test_a_length_penalty_is_refused_where_it_would_fight_or_do_nothing(name):
    with pytest.raises(ValueError, match=rf"method\.overlong: {name}"):
        resolve({"name": name, "overlong": {"max_tokens": 10, "buffer": 5}})


def test_lead_refuses_a_filter_by_group():
    with pytest.raises(ValueError, match="whitened over the step"):
        resolve({"name": "lead", "group_filter": True})


def test_all_wrong_groups_carry_signal_for_bet():
    """The shorter failure loses less."""
    given_inputs = inputs([0.0, 0.0], lengths_G=[10, 900])
    paid_G = bet.credit(given_inputs, bet.BetOptions(max_tokens=1000)).advantages_G
    assert paid_G[0] > 0 > paid_G[1]
    assert abs(advantages("grpo", [0.0, 0.0])).max() == 0


class TestRecrit:
    def turns(self, rewards, lengths=None, texts=None) -> Turns:
        size = len(rewards)
        return Turns(
            rewards_GK=torch.tensor(rewards, dtype=torch.float64),
            lengths_GK=torch.tensor(lengths or [[1, 1]] * size),
            texts_GK=tuple(texts or [("", "")] * size),
        )

    def test_the_four_transitions(self):
        correct_GK = torch.tensor([[0, 1], [1, 1], [1, 0], [0, 0]]).bool()
        assert recrit.transitions(correct_GK).tolist() == pytest.approx([1, 0.6, -1, -0.1])
        assert recrit.transitions(torch.tensor([[0, 1, 0]]).bool()).item() == 0

    def test_correcting_and_standing_firm_are_told_apart_where_the_final_answer_is_the_same(self):
        paid_G = recrit.rewards(self.turns([[0, 1], [1, 1]]), recrit.RecritOptions())
        assert paid_G[0] > paid_G[1] > 0

    def test_repetition(self):
        words = [str(i) for i in range(8)]
        assert recrit.repetition(" ".join(words)) == 0
        assert recrit.repetition("again " * 100) == pytest.approx(-92 / 93)
        assert recrit.repetition("too short") == recrit.repetition("") == 0
        assert recrit.repetition(" ".join(words * 2)) == pytest.approx(-1 / 9)

    @pytest.mark.parametrize(
        ("text", "pays"),
        [("<think>hm</think> 7", 1), (" <think>\n</think>x", 1), ("<think>hm</think>", 0), ("7", 0), ("<think>7", 0)],
    )
    def test_thinking(self, text, pays):
        assert recrit.thinks(text) == pays

    def test_side_rewards(self):
        """Turns of 4096 and 3584 tokens: -1 and -0.5; one of two thinks: (-1.5 + 1) / 2 x 0.2."""
        turns = self.turns([[0, 1]], [[4096, 3584]], [("<think>a</think>b", "b")])
        assert recrit.rewards(turns, recrit.RecritOptions()).item() == pytest.approx(1 - 0.05)

    def test_single_answers_are_refused(self):
        with pytest.raises(ValueError, match="these rollouts have one turn"):
            recrit.credit(replace(inputs([1.0, 0.0]), turns=None), recrit.RecritOptions())

    def test_metrics(self):
        turns = self.turns([[0, 1], [1, 1], [1, 0], [1, 0]])
        metrics = recrit.credit(replace(inputs([1.0, 1, 0, 0]), turns=turns), recrit.RecritOptions()).metrics
        assert metrics == {"first_turn_correct": 0.75, "repaired_share": 0.25, "broken_share": 0.5}

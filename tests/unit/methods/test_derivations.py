"""What the papers claim, or what was derived, of single parts: closed forms, limits and where they do nothing."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_gcpo.config.load import load
from megatron_gcpo.loss.correction import correct
from megatron_gcpo.loss.policy import cispo, geometric_mean_of_clipped, sequence_clip, soft_gate
from megatron_gcpo.loss.surrogate import ppo_clip
from megatron_gcpo.methods import METHODS, check_run, prepare, resolve
from megatron_gcpo.methods.conspo import coefficients
from megatron_gcpo.methods.darling import clusters
from megatron_gcpo.methods.gcpo_gold import transform
from megatron_gcpo.methods.holderpo import exponent
from megatron_gcpo.methods.kl import into_advantages
from megatron_gcpo.methods.phase import alone
from megatron_gcpo.methods.select import kth_largest
from megatron_gcpo.methods.token_credit.cuts import uniforms
from megatron_gcpo.methods.token_credit.flow import entropy_moves
from megatron_gcpo.types import TokenStats, Verdicts
from tests.unit.methods.test_credit import advantages
from tests.unit.methods.world import chosen, make_world, scored_batch, statistics, take_step

WORLD = make_world()
RNG = np.random.default_rng(0)


def row(*log_ratios: float, advantage: float = 1.0):
    """(batch of one row, its log-probabilities with gradient, old ones of 0)."""
    method, options = resolve({"name": "grpo"})
    batch, _ = scored_batch(method, options, make_world([[1.0, 0.0]], lengths=lambda rng: len(log_ratios)))
    batch = batch.rows([0])
    batch = replace(batch, advantages_T=batch.mask_T * advantage)
    logprobs_T = torch.cat([torch.zeros(2).double(), torch.tensor(log_ratios, dtype=torch.float64)]).requires_grad_()
    return batch, logprobs_T, torch.zeros(2 + len(log_ratios)).double()


class TestRatios:
    LOGS = (0.5, -0.7, 0.1, 1.2)

    def rho(self, power: float) -> float:
        batch, logp_T, old_T = row(*self.LOGS)
        loss_T, _ = sequence_clip(logp_T, old_T, batch, 0.999, 1e6, power)
        return -float(loss_T[-1].detach())

    def test_power_means_grow_with_the_exponent_and_are_continuous_at_0(self):
        means = [self.rho(p) for p in (-3, -1, -1e-3, -1e-6, 0, 1e-6, 1e-3, 1, 3)]
        assert means == sorted(means)
        assert means[2] == pytest.approx(means[6], rel=2e-3)
        assert self.rho(1) == pytest.approx(np.exp(self.LOGS).mean())
        assert self.rho(0) == pytest.approx(math.exp(np.mean(self.LOGS)))
        assert self.rho(-1) == pytest.approx(1 / np.exp(-np.array(self.LOGS)).mean())

    @pytest.mark.parametrize("power", [-2.0, -0.5, 0.0, 1.0, 2.5])
    def test_gradient_of_the_power_mean_is_rho_times_the_softmax_of_p_log_r(self, power):
        """W_t = r_t^p / sum r^p: uniform at p = 0 and ever more unequal with |p|."""
        batch, logp_T, old_T = row(*self.LOGS)
        loss_T, _ = sequence_clip(logp_T, old_T, batch, 0.999, 1e6, power)
        loss_T[-1].backward()
        assert logp_T.grad is not None
        weights = np.exp(power * np.array(self.LOGS))
        np.testing.assert_allclose(-logp_T.grad[2:], self.rho(power) * weights / weights.sum(), rtol=1e-12)
        assert (logp_T.grad[:2] == 0).all()

    def test_the_clip_of_a_row_takes_all_its_tokens(self):
        batch, logp_T, old_T = row(0.3, 0.3, -0.1)
        loss_T, metrics = sequence_clip(logp_T, old_T, batch, 3e-4, 4e-4)
        loss_T.sum().backward()
        assert logp_T.grad is not None
        assert not logp_T.grad.any()
        assert metrics["clip_fraction"].tolist() == [1.0] * 5

    def test_extreme_ratios_stay_finite(self):
        for power in (-2.0, 0.0, 2.0):
            batch, logp_T, old_T = row(90.0, -90.0, 0.0)
            loss_T, _ = sequence_clip(logp_T, old_T, batch, 0.2, 0.2, power)
            loss_T.sum().backward()
            assert torch.isfinite(loss_T).all()
            assert torch.isfinite(logp_T.grad).all()

    def test_one_token_rows_make_all_ratios_the_same(self):
        """With one token GSPO, HoelderPO of any p, and PPO's clip with the same range are one loss."""
        batch, logp_T, old_T = row(0.1)
        expected_T, _ = ppo_clip(logp_T, old_T, batch.advantages_T.double(), 0.2, 0.2)
        for power in (-2.0, 0.0, 1.5):
            loss_T, _ = sequence_clip(logp_T, old_T, batch, 0.2, 0.2, power)
            assert loss_T[-1].item() == pytest.approx(expected_T[-1].item())

    def test_cispo_keeps_the_gradient_that_the_clip_drops(self):
        logp_T = torch.tensor([2.0, -2.0, 0.1], dtype=torch.float64).requires_grad_()
        old_T, ones_T = torch.zeros(3).double(), torch.ones(3).double()
        cispo(logp_T, old_T, ones_T, 1.0, 4.0)[0].sum().backward()
        np.testing.assert_allclose(logp_T.grad, -np.minimum(np.exp([2.0, -2.0, 0.1]), 5), rtol=1e-12)

    def test_soft_gate_is_reinforce_on_policy_and_falls_off(self):
        logs = [0.0, 0.3, -0.3, 1.5]
        logp_T = torch.tensor(logs).double().requires_grad_()
        soft_gate(logp_T, torch.zeros(4).double(), torch.ones(4).double(), 1.0, 1.05)[0].sum().backward()
        slopes = -logp_T.grad / logp_T.detach().exp()
        assert slopes[0].item() == pytest.approx(1.0)
        assert (slopes[1:] < 1).all()
        assert slopes[3] < slopes[1]

    def test_gmpo_feels_an_outlier_through_its_clipped_logarithm(self):
        batch, logp_T, old_T = row(5.0, 0.0, 0.0, 0.0)
        loss_T, _ = geometric_mean_of_clipped(logp_T, old_T, batch, 0.4, 0.4)
        assert loss_T[-1].item() == pytest.approx(-math.exp(0.1))
        assert torch.autograd.grad(loss_T[-1], logp_T)[0][2] == 0

    def test_schedule_of_the_exponent(self):
        _, options = resolve({"name": "holderpo"})
        assert [exponent(options, x) for x in (0, 0.5, 1)] == [2, 0, -2]
        _, options = resolve({"name": "holderpo", "schedule": "cosine", "p_start": 1, "p_end": -1})
        assert [exponent(options, x) for x in (0, 0.5, 1)] == pytest.approx([1, 0, -1])
        _, options = resolve({"name": "holderpo", "schedule": "constant"})
        assert exponent(options, 0.7) == 2
        assert [take_step("holderpo", WORLD, step=s, total_steps=5).metrics["holder_p"] for s in (0, 2, 4)] == [
            2,
            0,
            -2,
        ]


class TestConspo:
    SCORES = torch.tensor([-1.0, -0.4, -0.9, -1.6]).double()
    RIGHT = torch.tensor([True, True, False, False])

    def test_coefficients_sum_to_zero_and_know_the_score(self):
        c_G = coefficients(self.SCORES, self.RIGHT, 0.5, 0.0)
        assert c_G.sum().item() == pytest.approx(0, abs=1e-12)
        assert c_G[0] < c_G[1] < 0, "the worst right answer is pushed hardest"
        assert c_G[2] > c_G[3] > 0, "the likeliest wrong answer is pulled hardest"

    def test_a_larger_margin_presses_harder(self):
        presses = [coefficients(self.SCORES, self.RIGHT, 0.5, m)[:2].abs().sum() for m in (0.0, 0.3, 1.0)]
        assert presses[0] < presses[1] < presses[2]

    def test_margin_grows_over_the_run(self):
        margins = [take_step("conspo", WORLD, step=s, total_steps=3).metrics["conspo_margin"] for s in range(3)]
        assert margins == [0, 0.25, 0.5]


class TestSets:
    def test_passk_with_k_1_is_grpo(self):
        rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
        np.testing.assert_allclose(advantages("passk", rewards, k=1), advantages("grpo", rewards), rtol=1e-12)

    def test_passk_leaves_easy_questions_alone_and_stands_by_hard_ones(self):
        assert not advantages("passk", [1.0, 1.0, 1.0, 0.0], k=2).any()
        lone = [advantages("passk", [1.0, *[0.0] * 7], k=k)[0] for k in (1, 2, 4)]
        assert lone[0] > lone[1] > lone[2] > 0

    @pytest.mark.parametrize("k", [2, 3])
    def test_pkpo_is_unbiased(self, k):
        """Two actions with rewards 1 and 0, log-odds x: d/dx of 1 - (1 - p)^k is k (1 - p)^(k-1) p (1 - p)."""
        p, size, mean = 0.3, 4, 0.0
        for actions in itertools.product((0, 1), repeat=size):
            probability = math.prod(p if a else 1 - p for a in actions)
            paid = advantages("pkpo", [float(a) for a in actions], k=k)
            mean += probability * np.mean([x * (a - p) for x, a in zip(paid, actions, strict=True)])
        assert k * mean == pytest.approx(k * (1 - p) ** (k - 1) * p * (1 - p))

    def test_pkpo_with_k_1_is_rloo(self):
        rewards = [0.2, 0.9, 0.4]
        np.testing.assert_allclose(advantages("pkpo", rewards, k=1), advantages("rloo", rewards), rtol=1e-12)

    @pytest.mark.parametrize("name", ["passk", "pkpo"])
    def test_a_set_larger_than_the_group_is_refused(self, name):
        with pytest.raises(ValueError, match=r"method\.k is 5, more than the 2 rollouts .* raise rollout\.group_size"):
            advantages(name, [1.0, 0.0], k=5)

    def test_clusters_are_connected_components(self):
        angles = torch.tensor([0.0, 0.3, 0.6, 2.0, 2.3]).double()
        rows = torch.stack([angles.cos(), angles.sin()], dim=1)
        assert clusters(rows, 5, math.cos(0.31)).tolist() == [0, 0, 0, 3, 3]
        assert clusters(rows, 5, math.cos(0.29)).tolist() == [0, 1, 2, 3, 4]
        assert clusters(None, 3, 0.5).tolist() == [0, 1, 2]

    def test_copies_are_paid_nothing_at_the_margin_and_share_under_shapley(self):
        """Two copies beside a new direction: each copy is missed by log((1 + 2c) / (1 + c)) only."""
        embeddings = torch.eye(3)[[0, 0, 1, 2]]
        method, options = resolve({"name": "marginal"})
        from tests.unit.methods.test_credit import inputs

        credit = method.credit(inputs([1.0, 1.0, 1.0, 0.0], embeddings), options)
        assert credit.credits_G.tolist() == pytest.approx([math.log(21 / 11), math.log(21 / 11), math.log(11), 0])
        assert credit.metrics["shared_value"] > 0

    def test_golden_answer_among_sixteen(self):
        world = make_world([[0.0] * 16], seed=4)
        taken = take_step("gcpo_gold", world)
        paid = sorted({round(x, 2) for x in taken.batch.advantages_T[taken.batch.mask_T > 0].tolist()})
        assert paid == [-0.25, 3.75]
        gold = taken.batch.advantages_T > 1
        assert torch.equal(taken.batch.rollout_logprobs_T[gold], taken.batch.old_logprobs_T[gold])
        assert not taken.batch.rollout_logprobs_T.isnan().any()

    def test_golden_answer_only_where_all_are_wrong(self):
        _, options = resolve({"name": "gcpo_gold"})
        for group, rewards_G, reference in zip(WORLD.groups, WORLD.rewards, WORLD.references, strict=True):
            verdict = Verdicts(rewards_G=rewards_G, statuses_G=("ok",) * 4)
            changed, judged = transform(group, verdict, reference, options)
            assert (changed is group) == bool(rewards_G.any())
            assert judged.rewards_G.sum() == max(rewards_G.sum(), 1)
            assert transform(group, verdict, None, options)[0] is group


class TestTokenCredit:
    def test_the_full_move_has_mean_zero_under_the_policy(self):
        """A constant advantage moves no entropy in the mean; the sampled form does."""
        p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
        entropy = -(p * p.log()).sum()
        method, options = chosen("opefo")
        batch, _ = scored_batch(method, options, make_world([[1.0, 0.0]], lengths=lambda rng: 4))
        batch = batch.rows([0])
        batch = replace(batch, advantages_T=batch.mask_T.clone())
        same = torch.ones(len(batch.mask_T)).double()
        stats = TokenStats(
            logprobs_T=torch.cat([torch.zeros(2).double(), p.log()]),
            entropy_T=entropy * same,
            sum_p2_T=(p**2).sum() * same,
            sum_p2_logp_T=(p**2 * p.log()).sum() * same,
        )
        full, sampled = (entropy_moves(batch, stats, form)[2:] for form in ("full", "sampled"))
        assert (p * full).sum().item() == pytest.approx(0, abs=1e-12)
        assert abs((p * sampled).sum().item()) > 1e-3
        assert full[0] < 0, "the likeliest token, reinforced, narrows"

    @pytest.mark.parametrize("form", ["full", "sampled"])
    def test_opefo_balances_the_flow(self, form):
        taken = take_step("opefo", WORLD, token_credit=[{"name": "opefo", "dh": form}])
        stats = statistics(WORLD.start, taken.batch)
        assert entropy_moves(taken.batch, stats, form).sum().item() == pytest.approx(0, abs=1e-6)
        assert abs(taken.metrics["opefo_lambda"]) < 1

    def test_papo_turns_the_flow_towards_the_entropy_it_keeps(self):
        flows = {}
        for kept in (0.5, None, 3.0):
            states = {} if kept is None else {"papo": {"entropy": kept}}
            taken = take_step("papo", WORLD, states=states)
            flows[kept] = entropy_moves(taken.batch, statistics(WORLD.start, taken.batch)).sum().item()
            assert (taken.batch.advantages_T[(taken.batch.mask_T > 0)].abs() > 0).sum() > 5
        assert flows[0.5] < flows[None] < flows[3.0]

    def test_papo_does_nothing_at_its_reference(self):
        plain, papo = take_step("dapo", WORLD), take_step("papo", WORLD)
        torch.testing.assert_close(plain.gradient, papo.gradient, rtol=1e-12, atol=1e-14)

    def test_cw_ignores_the_scale_of_the_covariance(self):
        halves = [take_step("cw_grpo", WORLD).batch.advantages_T, take_step("grpo", WORLD).batch.advantages_T]
        weights = halves[0] / torch.where(halves[1] == 0, 1, halves[1])
        mask = (halves[1] != 0).float()
        twice = take_step("gcpo", WORLD, token_credit=["cw"], normalize="none").metrics
        assert twice["cw_sigma"] > 0
        assert weights.max() > 1 > weights[mask > 0].min()

    def test_the_chain_is_applied_in_order(self):
        """cw then clip_cov equals clip_cov on a batch whose advantages cw has weighed."""
        method, options = chosen("gcpo", token_credit=["cw", {"name": "clip_cov", "share": 1.0, "low": 0.0}])
        _, first = chosen("gcpo", token_credit=["cw"])
        _, second = chosen("gcpo", token_credit=[{"name": "clip_cov", "share": 1.0, "low": 0.0}])
        batch, stats = scored_batch(method, options, WORLD)
        both, _, _ = prepare(method, options, batch, stats, {}, alone())
        step, _, _ = prepare(method, first, batch, stats, {}, alone())
        step, _, _ = prepare(method, second, step, stats, {}, alone())
        assert torch.equal(both.advantages_T, step.advantages_T)
        assert not torch.equal(both.advantages_T, batch.advantages_T)

    def test_draws_of_clip_cov_look_uniform_and_change_with_the_step(self):
        method, options = resolve({"name": "grpo"})
        batch, _ = scored_batch(method, options, make_world([[1.0, 0.0] * 20] * 30, lengths=lambda rng: 5))
        draws = [uniforms(batch, step)[batch.mask_T > 0] for step in (0, 1)]
        assert not torch.equal(*draws)
        for draw in draws:
            distinct = draw.unique()
            assert abs(distinct.mean().item() - 0.5) < 0.05
            assert len(distinct) > 500

    def test_kth_largest(self):
        values = torch.from_numpy(RNG.normal(size=50)).float()
        values[:3] = torch.tensor([0.0, -0.0, 1e-30])
        for k in (1, 2, 25, 49, 50):
            assert kth_largest(values, k, lambda x: x) == values.sort(descending=True).values[k - 1].item()
        assert kth_largest(values, 99, lambda x: x) == values.min().item()


class TestKl:
    def test_expo_halves_at_0_and_never_exceeds_the_weight(self):
        for accuracy, share in ((0.0, 0.5), (1.0, 0.8808)):
            taken = take_step("fg_expo", make_world([[accuracy] * 4] * 2))
            assert taken.metrics["kl_coef"] == pytest.approx(0.5 * share, abs=1e-4)

    def test_adaptive_weight_follows_the_target(self):
        """KL far above the target raises the weight by 20% x rollouts / horizon, far below lowers it; then it is kept."""
        section = {"loss": {"kl_coef": 0.1, "kl_controller": {"name": "adaptive", "target": 1e-4, "horizon": 160}}}
        first = take_step("gcpo", WORLD, **section)
        assert first.metrics["kl_coef"] == 0.1
        assert first.states["kl"]["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 16 / 160))
        second = take_step("gcpo", WORLD, states=first.states, **section)
        assert second.metrics["kl_coef"] == pytest.approx(0.102)
        section["loss"]["kl_controller"]["target"] = 1e4
        assert take_step("gcpo", WORLD, **section).states["kl"]["kl_coef"] < 0.1

    def test_penalty_in_the_reward_is_what_is_still_to_come(self):
        method, options = resolve({"name": "grpo"})
        batch, _ = scored_batch(method, options, make_world([[1.0, 0.0]], lengths=lambda rng: 3))
        penalty_T = torch.arange(len(batch.mask_T)).double()
        got_T = batch.advantages_T - into_advantages(batch, penalty_T, 0.5)
        expected = [0, 0, 0.5 * (2 + 3 + 4), 0.5 * (3 + 4), 0.5 * 4, 0, 0, 0.5 * (7 + 8 + 9), 0.5 * (8 + 9), 0.5 * 9]
        np.testing.assert_allclose(got_T, expected, rtol=1e-6)

    def test_penalty_in_the_reward_has_the_gradient_of_the_divergence(self):
        """Summed over all sequences of two tokens with their probabilities, it is -grad KL(pi || ref) of sequences."""
        rng = np.random.default_rng(7)
        first, ref_first = (torch.from_numpy(rng.normal(size=3)) for _ in range(2))
        second, ref_second = (torch.from_numpy(rng.normal(size=(3, 3))) for _ in range(2))
        first.requires_grad_(), second.requires_grad_()
        log_p = first.log_softmax(-1)[:, None] + second.log_softmax(-1)
        log_ref = ref_first.log_softmax(-1)[:, None] + ref_second.log_softmax(-1)
        expected = torch.autograd.grad((log_p.exp() * (log_p - log_ref)).sum(), [first, second])
        method, options = resolve({"name": "grpo"})
        one, _ = scored_batch(method, options, make_world([[0.0, 0.0]], lengths=lambda rng: 2))
        one = one.rows([0])
        total = [torch.zeros(3).double(), torch.zeros(3, 3).double()]
        for a, b in itertools.product(range(3), repeat=2):
            tokens = torch.stack([first.log_softmax(-1)[a], second.log_softmax(-1)[a, b]])
            refs = torch.stack([ref_first.log_softmax(-1)[a], ref_second.log_softmax(-1)[a, b]])
            penalty_T = torch.cat([torch.zeros(2).double(), (tokens - refs).detach()])
            paid_T = into_advantages(replace(one, advantages_T=torch.zeros(4)), penalty_T, 1.0)[2:].double()
            score = (tokens * paid_T).sum() * log_p[a, b].exp().detach()
            total = [t + g for t, g in zip(total, torch.autograd.grad(score, [first, second]), strict=True)]
        for got, wanted in zip(total, expected, strict=True):
            torch.testing.assert_close(-got, wanted, rtol=1e-5, atol=1e-6)

    def test_reinforce_pp_takes_the_penalty_before_it_normalizes(self):
        section = {"loss": {"kl_coef": 0.3}}
        taken = take_step("reinforce_pp", WORLD, **section)
        trained = taken.batch.advantages_T[taken.batch.mask_T > 0].double()
        assert trained.mean().item() == pytest.approx(0, abs=1e-6)
        assert trained.std(correction=0).item() == pytest.approx(1, abs=1e-4)
        assert len(trained.unique()) > 10


class TestComposition:
    RECIPE = "configs/recipe/quickstart.yaml"

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["method/opefo", "train.mini_batches=2"], r"train\.mini_batches is 2, but the constants of opefo"),
            (
                ["method/conspo", "train.mini_batches=2"],
                "constants of conspo are exact for one update only: set it to 1",
            ),
            (
                ["method/gcpo", "method.token_credit=[opefo]", "train.mini_batches=2"],
                "token_credit opefo wants 1: its balance",
            ),
            (["method/kl_cov"], r"kl_cov needs train\.mini_batches above 1: the first update"),
            (
                ["method/gcpo", "method.sampler=gaussian", "rollout.max_policy_lag=1"],
                r"sampler gaussian learns .*max_policy_lag 1 draws",
            ),
            (["method/gcpo_gold", "rollout.router_replay=true"], "router_replay wants the engine's experts"),
            (["method/recrit", "train.max_tokens_per_micro_batch=200"], "a conversation of recrit can have"),
            (
                [
                    *("method/recrit", "train.max_tokens_per_micro_batch=9999", "rollout.engine=vllm"),
                    "rollout.vllm.max_model_len=300",
                ],
                r"a conversation of recrit can have 408 tokens .* more than rollout\.vllm\.max_model_len 300: raise it",
            ),
            (["method/metis", "rollout.max_policy_lag=1"], r"sampler judged learns .*max_policy_lag 1 draws"),
            (
                ["method/metis", "train.max_tokens_per_micro_batch=600"],
                r"a question of method\.sampler judged with its answer can have 672 tokens \(4 problems .* at least 672",
            ),
            (
                ["method/recrit", "train.max_tokens_per_micro_batch=9999", "rollout.router_replay=true"],
                "the experts of every token from one engine call",
            ),
        ],
    )
    def test_what_would_do_something_else_is_refused(self, overrides, message):
        config = load(self.RECIPE, [*overrides, "method.loss.reduce=sequence_mean_token_mean"])
        with pytest.raises(ValueError, match=message):
            check_run(*resolve(config.method), config)

    def test_whole_answers_on_a_rank_where_tokens_are_compared(self):
        config = load(self.RECIPE, ["method/vigor"])
        check_run(*resolve(config.method), config)
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"context_parallel_size": 2})})
        with pytest.raises(ValueError, match=r"vigor compares all tokens .* set cluster\.context_parallel_size to 1"):
            check_run(*resolve(config.method), config)

    def test_a_reference_solution_must_be_there(self):
        config = load(self.RECIPE, ["method/gcpo_gold"])
        check_run(*resolve(config.method), config)
        source = config.data.train.model_copy(update={"kind": "jsonl", "path": "x"})
        config = config.model_copy(update={"data": config.data.model_copy(update={"train": source})})
        with pytest.raises(ValueError, match=r"data\.train has none: set data\.train\.demonstration_column"):
            check_run(*resolve(config.method), config)

    PARTS = ("cw", "opefo", "papo", "clip_cov", "kl_cov")
    KL = ("fixed", "adaptive", "expo")

    @pytest.mark.parametrize("part", PARTS)
    @pytest.mark.parametrize("controller", KL)
    @pytest.mark.parametrize("where", ["loss", "reward"])
    def test_gcpo_goes_with_every_token_credit_and_kl(self, part, controller, where):
        loss = {"kl_coef": 0.1, "kl_controller": controller, "kl_in": where}
        world = make_world(drift=0.0 if part == "opefo" else 0.15)
        taken = take_step("gcpo", world, token_credit=[part], loss=loss)
        assert torch.isfinite(taken.gradient).all()
        assert taken.gradient.abs().max() > 1e-4

    @pytest.mark.parametrize("kind", ["none", "token_tis", "sequence_tis", "masked", "geometric", "ais"])
    def test_gcpo_goes_with_every_correction(self, kind):
        """The weights multiply what phase one has left; an engine that agrees with the trainer leaves it as it is."""
        batch = take_step("gcpo", WORLD, token_credit=["cw"]).batch
        bounds = {"low": 0.97, "high": 1.03, "kappa": 1e-2, "sum_over_replicas": lambda values: values}
        drawn_T = batch.old_logprobs_T + 0.3 * torch.sin(torch.arange(len(batch.mask_T))) * batch.mask_T
        corrected, _ = correct(replace(batch, rollout_logprobs_T=drawn_T), kind, **bounds)
        assert torch.equal(corrected.advantages_T, batch.advantages_T)
        if kind != "none":
            assert torch.isfinite(corrected.correction_T).all()
            assert (corrected.correction_T[batch.mask_T > 0] != 1).any()
        agreed, _ = correct(replace(batch, rollout_logprobs_T=batch.old_logprobs_T), kind, **bounds)
        assert agreed.correction_T is None or (agreed.correction_T[batch.mask_T > 0] == 1).all()

    @pytest.mark.parametrize("sampler", ["uniform", "gaussian", "variance", "judged"])
    @pytest.mark.parametrize("name", METHODS)
    def test_every_method_goes_with_every_sampler(self, name, sampler):
        _, options = chosen(name, sampler=sampler)
        assert options.sampler.name == sampler

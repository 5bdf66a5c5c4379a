"""Stages 1-4 of a step, on the leader of a replica: sample a team per prompt, verify it, embed it, credit it.

Nothing here is collective: a prompt's text, rewards, embeddings and Shapley values never leave the replica that owns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_gcpo.credit.tokens import completions
from megatron_gcpo.embed import cosine_metrics, embed_groups, embedded_span
from megatron_gcpo.environments import judge_steps, score, turns_of
from megatron_gcpo.leader import Leader
from megatron_gcpo.methods import EMBEDDING_NEEDS, has_signal
from megatron_gcpo.observe.staleness import staleness
from megatron_gcpo.observe.tally import Tally
from megatron_gcpo.observe.timers import Stopwatch
from megatron_gcpo.run import Run
from megatron_gcpo.types import Credit, CreditInputs, Group, Steps, Verdicts


@dataclass(frozen=True, kw_only=True)
class Experience:
    """What one replica lived through in one step; the four tuples run in parallel."""

    groups: tuple[Group, ...]
    verdicts: tuple[Verdicts, ...]
    credits: tuple[Credit, ...]
    trained: tuple[bool, ...]
    """Whether the group enters the update: it carries signal, or the method keeps every group."""
    tally: Tally
    """Numbers of this replica, to be merged with those of others."""
    seen: Mapping[int, np.ndarray]
    """Index of each prompt that was sampled -> [G] rewards of its group as it was drawn, before any shaping."""

    def outcome(self) -> torch.Tensor:
        """[2] float64 (sum of the groups' mean rewards, number of groups) as sampled: what phase one may know of them."""
        means = [float(rewards_G.mean()) for rewards_G in self.seen.values()]
        return torch.tensor([sum(means), len(means)], dtype=torch.float64)

    def kept(self) -> tuple[list[Group], list[Credit]]:
        """The groups that enter the update, with their credits."""
        chosen = [i for i, kept in enumerate(self.trained) if kept]
        return [self.groups[i] for i in chosen], [self.credits[i] for i in chosen]

    def entropies(self, entropy_T: torch.Tensor | None) -> list[list[np.ndarray] | None]:
        """Per group and rollout [T] of its completion, from those of the batch of ``kept``; None where it has none."""
        known = iter([] if entropy_T is None else completions(self.kept()[0], entropy_T))
        return [next(known, None) if kept else None for kept in self.trained]


def collect(run: Run, leader: Leader, step: int, clock: Stopwatch) -> Experience:
    """This replica's share of a step, with refill rounds for groups without signal where the method asks for them."""
    wanted = len(leader.sampler.share(step, run.topology.replica))
    groups: list[Group] = []
    verdicts: list[Verdicts] = []
    credits: list[Credit] = []
    trained: list[bool] = []
    tally = Tally()
    seen: dict[int, np.ndarray] = {}
    drawn: list[Verdicts] = []
    for round in range(1 + run.options.refill):
        prompts = leader.sampler.share(step, run.topology.replica, round)
        if sum(trained) >= wanted or not prompts:
            break
        with clock("generate"):
            sampled = leader.rollouts.take(step, round)
        tally.add_all(leader.rollouts.take_metrics())
        with clock("verify"):
            judged = score(leader.pool, sampled)
            tally.add_all({name: float(n) for name, n in leader.pool.counts.items()})
        drawn += judged
        seen |= {i: verdict.rewards_G for i, verdict in zip(prompts, judged, strict=True)}
        sampled, judged = _transformed(run, leader, prompts, sampled, judged)
        paid = _credit(run, leader, sampled, judged, clock, tally)
        for credit in paid:
            room = sum(trained) < wanted
            trained.append(room and (not run.options.group_filter or has_signal(credit.advantages_G)))
        groups += sampled
        verdicts += judged
        credits += paid
    return Experience(
        groups=tuple(groups),
        verdicts=tuple(verdicts),
        credits=tuple(credits),
        trained=tuple(trained),
        tally=_describe(run, step, groups, drawn, credits, trained, tally),
        seen=seen,
    )


def _transformed(
    run: Run, leader: Leader, prompts: Sequence[int], groups: list[Group], verdicts: list[Verdicts]
) -> tuple[list[Group], list[Verdicts]]:
    """The groups that are credited, where the method replaces rollouts."""
    transform = run.method.transform
    if transform is None:
        return groups, verdicts
    changed = [
        transform(group, verdict, leader.reference_rollout(i, run.config.rollout.max_new_tokens), run.options)
        for i, group, verdict in zip(prompts, groups, verdicts, strict=True)
    ]
    return [group for group, _ in changed], [verdict for _, verdict in changed]


def _credit(
    run: Run, leader: Leader, groups: list[Group], verdicts: list[Verdicts], clock: Stopwatch, tally: Tally
) -> list[Credit]:
    lengths = [_lengths(group) for group in groups]
    rewards = [_shaped(run, group, verdict) for group, verdict in zip(groups, verdicts, strict=True)]
    embeddings: list[torch.Tensor | None] = [None] * len(groups)
    if run.needs & EMBEDDING_NEEDS:
        assert leader.encoder is not None, "got no encoder, expected one for a method that compares embeddings"
        with clock("embed"):
            embeddings = embed_groups(leader.encoder, groups, _embedded(run, rewards), span=run.config.embed.span)
            tally.add_all({**leader.encoder.take_metrics(), **cosine_metrics(embeddings)})
    steps: list[Steps | None] = [None] * len(groups)
    if run.method.steps is not None:
        with clock("verify"):
            steps = list(judge_steps(leader.pool, groups, verdicts, run.method.steps, leader.decode))
    with clock("credit"):
        return [
            run.method.credit(
                CreditInputs(
                    rewards_G=rewards_G,
                    embeddings_GD=embeddings_GD,
                    lengths_G=lengths_G,
                    logprobs_G=_logprobs(group),
                    texts_G=tuple(rollout.text for rollout in group.rollouts),
                    turns=turns_of(group, verdict),
                    steps=own_steps,
                ),
                run.options,
            )
            for group, verdict, own_steps, rewards_G, embeddings_GD, lengths_G in zip(
                groups, verdicts, steps, rewards, embeddings, lengths, strict=True
            )
        ]


def _embedded(run: Run, rewards: list[torch.Tensor]) -> list[torch.Tensor]:
    """Per group [G], not 0 for the rollouts whose embedding the credit may look at."""
    if "all_embeddings" in run.needs:
        return [torch.ones_like(rewards_G) for rewards_G in rewards]
    return rewards


def _logprobs(group: Group) -> torch.Tensor:
    return torch.tensor([float(r.logprobs.sum(dtype="float64")) for r in group.rollouts], dtype=torch.float64)


def _lengths(group: Group) -> torch.Tensor:
    return torch.tensor([len(r.token_ids) for r in group.rollouts])


def _shaped(run: Run, group: Group, verdict: Verdicts) -> torch.Tensor:
    """[G] float64 rewards as the credit sees them."""
    return run.method.shape_rewards(torch.from_numpy(verdict.rewards_G).double(), _lengths(group), run.options)


def _describe(
    run: Run,
    step: int,
    groups: list[Group],
    verdicts: list[Verdicts],
    credits: list[Credit],
    trained: list[bool],
    tally: Tally,
) -> Tally:
    for group, verdict, credit, kept in zip(groups, verdicts, credits, trained, strict=True):
        tally.add("reward/mean", verdict.rewards_G.tolist())
        tally.add("reward/all_right_groups", float((verdict.rewards_G >= 1).all()))
        tally.add("reward/all_wrong_groups", float((verdict.rewards_G == 0).all()))
        tally.add("rollout/length_mean", [float(len(r.token_ids)) for r in group.rollouts])
        tally.add("rollout/truncated_share", [float(r.finish_reason == "length") for r in group.rollouts])
        tally.add("credit/trained_groups_share", float(kept))
        tally.add("credit/advantage_abs_mean", float(credit.advantages_G.abs().mean()))
        tally.add_all(credit.metrics, prefix="credit/")
        if run.config.rollout.max_policy_lag:
            tally = tally.merge([staleness(group, step, run.config.rollout.max_policy_lag)])
    return tally


def embedded_texts(run: Run, experience: Experience) -> list[list[str | None]]:
    """Per group and rollout the text whose embedding its credit used, None where the cost rule spared it."""
    if not run.needs & EMBEDDING_NEEDS:
        return [[None] * len(group.rollouts) for group in experience.groups]
    texts: list[list[str | None]] = []
    for group, verdict in zip(experience.groups, experience.verdicts, strict=True):
        rewarded_G = _embedded(run, [_shaped(run, group, verdict)])[0] != 0
        used_G = rewarded_G & (rewarded_G.sum() >= 2)
        texts.append(
            [
                embedded_span(rollout.text, run.config.embed.span) if used else None
                for rollout, used in zip(group.rollouts, used_G, strict=True)
            ]
        )
    return texts

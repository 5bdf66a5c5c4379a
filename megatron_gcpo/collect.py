"""Stages 1-4 of a step, on the leader of a replica: sample a team per prompt, verify it, embed it, credit it.

Nothing here is collective: a prompt's text, rewards, embeddings and Shapley values never leave the replica that owns it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_gcpo.embed import cosine_metrics, embed_groups, embedded_span
from megatron_gcpo.methods import has_signal
from megatron_gcpo.observe.tally import Tally
from megatron_gcpo.observe.timers import Stopwatch
from megatron_gcpo.rollout import generate_groups
from megatron_gcpo.run import Leader, Run
from megatron_gcpo.types import Credit, CreditInputs, Group, Verdicts


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

    def kept(self) -> tuple[list[Group], list[Credit]]:
        """The groups that enter the update, with their credits."""
        chosen = [i for i, kept in enumerate(self.trained) if kept]
        return [self.groups[i] for i in chosen], [self.credits[i] for i in chosen]


def collect(run: Run, leader: Leader, step: int, clock: Stopwatch) -> Experience:
    """This replica's share of a step, with refill rounds for groups without signal where the method asks for them."""
    wanted = len(leader.sampler.share(step, run.topology.replica))
    groups: list[Group] = []
    verdicts: list[Verdicts] = []
    credits: list[Credit] = []
    trained: list[bool] = []
    tally = Tally()
    for round in range(1 + run.options.refill):
        prompts = leader.sampler.share(step, run.topology.replica, round)
        if sum(trained) >= wanted or not prompts:
            break
        with clock("generate"):
            sampled = generate_groups(
                leader.engine,
                [leader.prompts.prompts[i] for i in prompts],
                group_size=run.config.rollout.group_size,
                max_new_tokens=run.config.rollout.max_new_tokens,
                sampling=leader.sampling,
                decode=leader.decode,
                run_seed=run.config.run.seed,
                step=step,
            )
        with clock("verify"):
            judged = leader.pool.score(sampled)
            tally.add_all({name: float(n) for name, n in leader.pool.counts.items()})
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
        tally=_describe(run, groups, verdicts, credits, trained, tally),
    )


def _credit(
    run: Run, leader: Leader, groups: list[Group], verdicts: list[Verdicts], clock: Stopwatch, tally: Tally
) -> list[Credit]:
    lengths = [_lengths(group) for group in groups]
    rewards = [_shaped(run, group, verdict) for group, verdict in zip(groups, verdicts, strict=True)]
    embeddings: list[torch.Tensor | None] = [None] * len(groups)
    if "embeddings" in run.needs:
        assert leader.encoder is not None, "got no encoder, expected one for a method that compares embeddings"
        with clock("embed"):
            embeddings = embed_groups(leader.encoder, groups, rewards, span=run.config.embed.span)
            tally.add_all({**leader.encoder.take_metrics(), **cosine_metrics(embeddings)})
    with clock("credit"):
        return [
            run.method.credit(
                CreditInputs(rewards_G=rewards_G, embeddings_GD=embeddings_GD, lengths_G=lengths_G), run.options
            )
            for rewards_G, embeddings_GD, lengths_G in zip(rewards, embeddings, lengths, strict=True)
        ]


def _lengths(group: Group) -> torch.Tensor:
    return torch.tensor([len(r.token_ids) for r in group.rollouts])


def _shaped(run: Run, group: Group, verdict: Verdicts) -> torch.Tensor:
    """[G] float64 rewards as the credit sees them."""
    return run.method.shape_rewards(torch.from_numpy(verdict.rewards_G).double(), _lengths(group), run.options)


def _describe(
    run: Run,
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
    return tally


def embedded_texts(run: Run, experience: Experience) -> list[list[str | None]]:
    """Per group and rollout the text whose embedding its credit used, None where the cost rule spared it."""
    if "embeddings" not in run.needs:
        return [[None] * len(group.rollouts) for group in experience.groups]
    texts: list[list[str | None]] = []
    for group, verdict in zip(experience.groups, experience.verdicts, strict=True):
        rewarded_G = _shaped(run, group, verdict) != 0
        used_G = rewarded_G & (rewarded_G.sum() >= 2)
        texts.append(
            [
                embedded_span(rollout.text, run.config.embed.span) if used else None
                for rollout, used in zip(group.rollouts, used_G, strict=True)
            ]
        )
    return texts

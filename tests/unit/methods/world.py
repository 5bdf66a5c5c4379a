"""A world in which every method can take a step in milliseconds: a bigram policy in float64, some groups, plain autograd.

The policy is a table of logits [V, V]: the next token's distribution depends on the last token alone, so everything a method
may ask of a policy is known exactly, and the gradient of a step is a gradient of that table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron_gcpo.credit.tokens import rollout_batch
from megatron_gcpo.loss import count, token_weights
from megatron_gcpo.methods import EMBEDDING_NEEDS, Method, MethodOptions, Scope, prepare, resolve, without_unsampled
from megatron_gcpo.types import CreditInputs, Group, Prompt, Rollout, Steps, TokenBatch, TokenStats, Turns, Verdicts

VOCABULARY = 7
MAX_TOKENS = 6
SECTIONS: dict[str, dict[str, Any]] = {
    "darling": {"threshold": 0.6},
    "passk": {"k": 2},
    "pkpo": {"k": 3},
    "clip_cov": {"token_credit": [{"name": "clip_cov", "share": 1.0, "low": 0.05, "high": 5.0}]},
    "kl_cov": {"token_credit": [{"name": "kl_cov", "share": 0.2, "coef": 0.7}]},
    "entropy_bonus": {"loss": {"entropy_coef": 0.3}},
    "fg_expo": {"loss": {"kl_coef": 0.5}},
    "rspo": {"lam": 0.7},
    "lead": {"shortest": 1, "longest": 5},
    "bet": {"max_tokens": 5},
    "recrit": {"max_tokens": 5, "buffer": 3},
    "ed_grpo": {"alpha": 0.3},
    "ed_idpo": {"alpha": 0.3, "beta": 0.6},
    "gspo": {"loss": {"clip_low": 0.03, "clip_high": 0.04}},
}
"""Options under which the part that makes a method what it is shows in a world this small."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Judged groups, what is known of their meaning, a reference solution for each, and three policies."""

    groups: tuple[Group, ...]
    rewards: tuple[np.ndarray, ...]
    embeddings: tuple[torch.Tensor, ...]
    references: tuple[Rollout | None, ...]
    start: torch.Tensor
    """[V, V] float64: the old policy."""
    current: torch.Tensor
    """The policy that is differentiated; the old one or near it."""
    reference: torch.Tensor

    def permuted(self, orders: Sequence[Sequence[int]]) -> World:
        """The same with the rollouts of each group in another order."""
        groups = tuple(
            replace(group, rollouts=tuple(group.rollouts[i] for i in order))
            for group, order in zip(self.groups, orders, strict=True)
        )
        rewards = tuple(r[list(order)] for r, order in zip(self.rewards, orders, strict=True))
        embeddings = tuple(e[list(order)] for e, order in zip(self.embeddings, orders, strict=True))
        return replace(self, groups=groups, rewards=rewards, embeddings=embeddings)

    def part(self, groups: slice) -> World:
        """The share of one replica."""
        names = ("groups", "rewards", "embeddings", "references")
        return replace(self, **{name: getattr(self, name)[groups] for name in names})

    def rewarded(self, rewards: Sequence[Sequence[float]]) -> World:
        return replace(self, rewards=tuple(np.asarray(r, dtype=np.float32) for r in rewards))


def make_world(
    rewards: Sequence[Sequence[float]] = ((1, 0, 1, 0), (1, 1, 1, 0), (0, 0, 0, 0), (1, 1, 1, 1)),
    *,
    lengths: Callable[[np.random.Generator], int] = lambda rng: int(rng.integers(1, MAX_TOKENS)),
    drift: float = 0.15,
    seed: int = 0,
) -> World:
    """drift: size of the difference of the current from the old policy; 0: on policy."""
    rng = np.random.default_rng(seed)
    start = torch.from_numpy(rng.normal(size=(VOCABULARY, VOCABULARY)))
    groups, embeddings, references = [], [], []
    for p, group_rewards in enumerate(rewards):
        prompt = Prompt(id=f"p{p}", token_ids=tuple(rng.integers(0, VOCABULARY, 2).tolist()), text="", answer="")
        rollouts = [_rollout(start, prompt.token_ids[-1], lengths(rng), rng) for _ in group_rewards]
        groups.append(Group(prompt=prompt, rollouts=tuple(rollouts)))
        references.append(
            replace(_rollout(start, prompt.token_ids[-1], 3, rng), logprobs=np.full(3, np.nan, np.float32))
        )
        rows = torch.from_numpy(rng.normal(size=(len(rollouts), 3)) + np.array([1.0, 0, 0]))
        embeddings.append(torch.nn.functional.normalize(rows, dim=1).float())
    noise = [torch.from_numpy(rng.normal(size=start.shape)) for _ in range(2)]
    return World(
        groups=tuple(groups),
        rewards=tuple(np.asarray(r, dtype=np.float32) for r in rewards),
        embeddings=tuple(embeddings),
        references=tuple(references),
        start=start,
        current=start + drift * noise[0],
        reference=start + 0.3 * noise[1],
    )


def _rollout(table: torch.Tensor, last: int, length: int, rng: np.random.Generator) -> Rollout:
    ids, logprobs = [], []
    for _ in range(length):
        p = table[last].softmax(-1).numpy()
        last = int(rng.choice(VOCABULARY, p=p))
        ids.append(last)
        logprobs.append(np.log(p[last]))
    return Rollout(
        token_ids=np.array(ids, dtype=np.int64),
        logprobs=np.array(logprobs, dtype=np.float32),
        text=" ".join(map(str, ids)),
        finish_reason="stop",
        versions_T=np.zeros(length, dtype=np.int32),
    )


def statistics(table: torch.Tensor, batch: TokenBatch) -> TokenStats:
    """What the policy says of each token of a batch; 0 on the first token of a row. Differentiable."""
    before_T = batch.tokens_T.roll(1)
    first_T = torch.zeros(len(batch.tokens_T), dtype=torch.bool)
    first_T[batch.cu_seqlens_N1[:-1][batch.lengths_N > 0]] = True
    log_p_TV = table.log_softmax(-1)[before_T]
    p_TV = log_p_TV.exp()
    values = (
        log_p_TV.gather(1, batch.tokens_T[:, None])[:, 0],
        -(p_TV * log_p_TV).sum(-1),
        p_TV.square().sum(-1),
        (p_TV.square() * log_p_TV).sum(-1),
    )
    names = ("logprobs_T", "entropy_T", "sum_p2_T", "sum_p2_logp_T")
    stats = TokenStats(**{n: torch.where(first_T, 0.0, v) for n, v in zip(names, values, strict=True)})
    residuals_TV = p_TV.detach() - torch.nn.functional.one_hot(batch.tokens_T, len(table))
    return replace(stats, head_gram_T=head_gram(residuals_TV, torch.eye(len(table)).double()[before_T], batch))


def head_gram(residuals_TV: torch.Tensor, hidden_TH: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """TokenStats.head_gram_T from (p - e) and hidden states: token by token against its row's whole gradient."""
    residuals_TV = residuals_TV * batch.mask_T[:, None]
    gram_T = torch.zeros(len(residuals_TV), dtype=residuals_TV.dtype)
    for begin, end in zip(batch.cu_seqlens_N1[:-1].tolist(), batch.cu_seqlens_N1[1:].tolist(), strict=True):
        gradient_VH = residuals_TV[begin:end].T @ hidden_TH[begin:end]
        gram_T[begin:end] = ((residuals_TV[begin:end] @ gradient_VH) * hidden_TH[begin:end]).sum(1)
    return gram_T


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one step came to."""

    gradient: torch.Tensor
    """[V, V] float64, of the loss of the global batch."""
    loss: float
    batch: TokenBatch
    """After phase one, with weights."""
    states: Mapping[str, Any]
    metrics: Mapping[str, float]


def chosen(name: str, **section: Any) -> tuple[Method, MethodOptions]:
    return resolve({"name": name, **SECTIONS.get(name, {}), **section})


def credited_batch(method: Method, options: MethodOptions, world: World) -> TokenBatch:
    """The batch as the leader makes it: every token with its rollout's advantage."""
    groups, credits = [], []
    needs = method.needs_for(options)
    for group, rewards_G, embeddings_GD, reference in zip(
        world.groups, world.rewards, world.embeddings, world.references, strict=True
    ):
        verdict = Verdicts(rewards_G=rewards_G, statuses_G=("ok",) * len(rewards_G))
        if method.transform is not None:
            group, verdict = method.transform(group, verdict, reference, options)
        lengths_G = torch.tensor([len(r.token_ids) for r in group.rollouts])
        inputs = CreditInputs(
            rewards_G=method.shape_rewards(torch.from_numpy(verdict.rewards_G).double(), lengths_G, options),
            embeddings_GD=embeddings_GD if needs & EMBEDDING_NEEDS else None,
            lengths_G=lengths_G,
            logprobs_G=torch.tensor([float(r.logprobs.sum(dtype="float64")) for r in group.rollouts]).double(),
            texts_G=tuple(r.text for r in group.rollouts),
            steps=two_steps(group, verdict) if method.steps is not None else None,
            turns=conversation(group, verdict) if method.environment is not None else None,
        )
        groups.append(group)
        credits.append(method.credit(inputs, options))
    return rollout_batch(groups, credits)


def two_steps(group: Group, verdict: Verdicts) -> Steps:
    """The first token is a step of its own, right where the rollout has an odd number of tokens."""
    lengths_G = [len(r.token_ids) for r in group.rollouts]
    first_G = torch.tensor(lengths_G).remainder(2).double()
    return Steps(
        rewards_GK=torch.stack([first_G, torch.from_numpy(verdict.rewards_G).double()], 1),
        step_of_token_G=tuple((torch.arange(length) > 0).long() for length in lengths_G),
    )


def conversation(group: Group, verdict: Verdicts) -> Turns:
    """Two turns that end as the rollout did; the first was right where the rollout has an odd number of tokens."""
    lengths_G = torch.tensor([len(r.token_ids) for r in group.rollouts])
    return Turns(
        rewards_GK=torch.stack([lengths_G.remainder(2), torch.from_numpy(verdict.rewards_G)], 1).double(),
        lengths_GK=lengths_G[:, None].expand(-1, 2),
        texts_GK=tuple((r.text, r.text) for r in group.rollouts),
    )


def accuracy(world: World, total: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Mean reward of the rollouts of all replicas."""
    rewards = np.concatenate(world.rewards)
    sums = total(torch.tensor([rewards.sum(), len(rewards)], dtype=torch.float64)).tolist()
    return sums[0] / sums[1]


def scored_batch(method: Method, options: MethodOptions, world: World) -> tuple[TokenBatch, TokenStats]:
    """The batch as the step has it before phase one, with float64 log-probabilities of the world's policies."""
    batch = credited_batch(method, options, world)
    stats = statistics(world.start, batch)
    held = "ref_logprobs" in method.needs_for(options)
    batch = replace(
        batch,
        old_logprobs_T=stats.logprobs_T,
        ref_logprobs_T=statistics(world.reference, batch).logprobs_T if held else None,
    )
    return without_unsampled(batch), stats


def take_step(
    name: str,
    world: World,
    *,
    states: Mapping[str, Any] | None = None,
    step: int = 0,
    total_steps: int = 3,
    total: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    micro: Callable[[TokenBatch], list[list[int]]] | None = None,
    blemish: Callable[[TokenBatch, TokenStats], tuple[TokenBatch, TokenStats]] | None = None,
    **section: Any,
) -> Taken:
    """One update on one replica. micro: the rows of each micro-batch; blemish: what to do to the scored batch."""
    method, options = chosen(name, **section)
    batch, stats = scored_batch(method, options, world)
    if blemish is not None:
        batch, stats = blemish(batch, stats)
    batch = replace(batch, scalars={"accuracy": accuracy(world, total)})
    scope = Scope(step=step, total_steps=total_steps, sum=total)
    batch, after, metrics = prepare(method, options, batch, stats, states or {}, scope)
    own = count(batch)
    numbers = total(torch.tensor([own.num_tokens, own.num_rows, own.num_groups], dtype=torch.float64)).long().tolist()
    totals = replace(own, num_tokens=numbers[0], num_rows=numbers[1], num_groups=numbers[2])
    weights_T = token_weights(batch, totals, options.loss.reduce, MAX_TOKENS)
    batch = replace(batch, weights_T=weights_T)
    current = world.current.clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for rows in micro(batch) if micro else [list(range(batch.num_rows))]:
        part = batch.rows(rows)
        loss_T, _ = method.token_loss(statistics(current, part), part, options)
        loss = loss + (part.weights_T.double() * loss_T).sum()
    (gradient,) = torch.autograd.grad(loss, current, allow_unused=True)
    gradient = torch.zeros_like(current) if gradient is None else gradient
    return Taken(gradient=gradient, loss=loss.item(), batch=batch, states=after, metrics=metrics)

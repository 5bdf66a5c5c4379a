"""What the loop asks of a rollout engine: token ids in, token ids and log-probs out, weights by Hugging Face name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One completion wanted."""

    prompt_token_ids: tuple[int, ...]
    seed: int
    """In [0, 2^64). The completion depends on the weights, the prompt, the sampling and this number, nothing else."""
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution tokens are drawn from: softmax(logits / temperature), cut by min_p, top_k, top_p, renormalised.

    ``logprobs`` of a Sample are under this very distribution. A trainer that evaluates softmax(logits / temperature)
    over the whole vocabulary can only reproduce them without a cut: ``min_p = 0``, ``top_k = 0`` and ``top_p = 1``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens; 1: greedy decoding."""
    min_p: float = 0.0
    """Tokens less likely than min_p times the likeliest are left out."""
    stop_token_ids: tuple[int, ...] = ()
    """Drawing one of these ends the completion; it is kept as the last token. Every other id, padding included, is an
    ordinary token: leaving one out would make the engine's distribution differ from the trainer's."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; set rollout.temperature above 0 (greedy: top_k: 1)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; set rollout.top_p in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; set rollout.top_k to 0 (all tokens) or more")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p is {self.min_p}; set rollout.min_p in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion drawn."""

    token_ids: np.ndarray
    """[T] int64, T >= 1, including the stop token when ``finish_reason == "stop"``."""
    logprobs: np.ndarray
    """[T] float32, natural log, of each token under the distribution it was drawn from."""
    finish_reason: str
    """"stop" or "length"."""
    versions_T: np.ndarray
    """[T] int32 policy version of the weights that drew each token; more than one after an update in flight."""
    routed_experts: np.ndarray | None = None
    """[prompt + T, layers, k] int16 experts, best first, to which each layer of the model sent each token of prompt and
    completion when it was first computed; -1 in layers without experts and where unknown (the last token drawn never
    passed through the model). None unless rollout.router_replay asks for it."""


class WeightControl(Protocol):
    """How a push reaches the workers that hold an engine's weights: in this process, in child processes, or over HTTP.

    The workers run vLLM with our worker extension (rollout.vllm.worker). The four calls of vLLM's weight-transfer
    protocol and ``rpc`` are the same whichever way they travel; every call raises ValueError when a worker fails, is gone
    or does not answer in time.
    """

    @property
    def num_workers(self) -> int:
        """Workers in all, over the replicas of the engine and their tensor-parallel ranks."""
        ...

    @property
    def same_host(self) -> bool:
        """Whether shared memory and CUDA IPC reach them."""
        ...

    def rpc(self, method: str, arguments: Mapping[str, Any] | None = None) -> list[Any]:
        """Run a method of the worker extension on every worker; one result per worker. JSON values in and out."""
        ...

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Mapping[str, Any]) -> None: ...

    def finish_weight_update(self, version: int) -> None: ...


class RolloutEngine(Protocol):
    """A rollout engine serves one complete set of weights, or nothing.

    It refuses (ValueError) to generate and to score before the first complete ``load_weights``, after a failed one,
    after ``refuse``, and while asleep; the next complete ``load_weights`` makes it serve again.
    """

    @property
    def policy_version(self) -> int:
        """Number of the last complete ``load_weights``: 0 before the first, then 1, 2, ... unless told otherwise."""
        ...

    @property
    def max_positions(self) -> int:
        """Longest sequence in tokens, prompt and completion, that the model can hold."""
        ...

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        """Draw one completion per request, in the order of the requests."""
        ...

    def score(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Log-probabilities of given completions: per (prompt ids, completion ids) a [T] float32 array.

        Under softmax(logits / temperature) over the whole vocabulary: what a trainer computes for the same tokens.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int | None = None) -> None:
        """Replace all weights by these, named and shaped as in a Hugging Face checkpoint of the model.

        ``version`` becomes the policy version; None: one more than before. All or refuse: a missing, unknown, repeated
        or wrongly shaped tensor raises ValueError, and the engine then refuses to serve until a complete load.
        """
        ...

    @property
    def control(self) -> WeightControl | None:
        """The way to the workers that hold the weights; None: they are in this object, ``load_weights`` is the way.

        Ask anew for each push: the same object means the same workers; another one means that some are gone or new, and
        whatever was set up with the former ones is void.
        """
        ...

    def commit(self, version: int) -> None:
        """Serve the weights that were pushed through ``control`` as this version; forgets cached prefixes."""
        ...

    def pause(self) -> None:
        """Stop drawing tokens; requests under way keep what they have. Returns when no token is being drawn."""
        ...

    def resume(self) -> None:
        """Undo ``pause``: requests under way go on with the weights held now, their prefixes computed anew."""
        ...

    def refuse(self, reason: str) -> None:
        """Serve nothing until the next complete ``load_weights``; ``reason`` completes "the weights are unfit: ..."."""
        ...

    def sleep(self) -> None:
        """Give accelerator memory back between steps; the engine refuses to work until ``wake``."""
        ...

    def wake(self) -> None:
        """Undo ``sleep``; harmless on an engine that is awake."""
        ...

    def close(self) -> None:
        """End what the engine started and free what it holds; it serves nothing any more."""
        ...


def check_fits(prompt_tokens: int, max_new_tokens: int, max_positions: int, who: str) -> None:
    """ValueError when prompt and completion together could exceed the model's positions; ``who`` names the prompt."""
    if prompt_tokens == 0:
        raise ValueError(f"{who} has no tokens; an engine needs at least one to start from: check data.template")
    if prompt_tokens + max_new_tokens > max_positions:
        raise ValueError(
            f"{who} has {prompt_tokens} tokens and {max_new_tokens} may be generated, but the model holds "
            f"{max_positions} positions; lower rollout.max_new_tokens to {max(0, max_positions - prompt_tokens)} or "
            f"data.max_prompt_tokens to {max(0, max_positions - max_new_tokens)}"
        )

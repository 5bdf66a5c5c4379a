"""The embedded rollout engine: a transformers causal language model in the leader's process.

Faithful rather than fast on large models, and fast on small ones: one cache slab written in place, each distinct
prompt computed once for all its samples, finished rows dropped from the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from megatron_gcpo.rollout.engine import Sample, SampleRequest, Sampling, check_fits
from megatron_gcpo.rollout.gate import Gate
from megatron_gcpo.rollout.hf_weights import checkpoint_slots, load_into
from megatron_gcpo.rollout.kv_cache import ATTENTION_NAME, SlabCache
from megatron_gcpo.rollout.routing import RoutedTokens, RoutingRecorder
from megatron_gcpo.rollout.sampling import UniformStreams, draw, sampling_logprobs

COMPACT_BELOW = 0.85
"""Share of unfinished rows below which the finished ones are dropped. Copying the cache costs about one token."""
SCORE_LOGITS = 1 << 26
"""Logits held at once while scoring (256 MB in float32)."""
SCORE_CHUNK_TOKENS = 64
"""A large vocabulary takes fewer rows at once rather than fewer tokens of each: every pass reads all the weights."""
MASK_ELEMENTS = 1 << 26
"""Elements of the mask of one pass over the prefixes of unfinished rows (256 MB in float32)."""


class TransformersEngine:
    """A RolloutEngine on a transformers model built from its Hugging Face config. Weights arrive by ``load_weights``.

    ``generate`` may run in one thread while another pauses it and loads weights: unfinished rows then go on with the new
    weights, what they have so far computed anew. A load without a pause waits for the token being drawn and does the same.

    Args:
        hf_config: of a decoder with full attention in every layer (Qwen3, Qwen3-MoE, Llama, ...). Not modified.
        dtype: of weights, activations and cache. Sampling and log-probabilities are float32 either way.
        max_batch_rows: sequences decoded at once; more requests take more rounds.
        return_routed_experts: record for each sample which experts computed its tokens (rollout.router_replay).

    Raises:
        ValueError: the model has sliding-window or linear attention layers, or no experts to record, or its checkpoint
            format cannot be mapped.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_batch_rows: int,
        return_routed_experts: bool = False,
    ) -> None:
        config = copy.deepcopy(hf_config).get_text_config()
        _require_full_attention(config)
        # the weights come later: drawing random ones would cost time and advance the caller's random state
        with no_init_weights(), torch.device(device):
            self._model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
        self._model.tie_weights()  # part of the initialisation that was left out
        self._model.eval().requires_grad_(False)
        self._config, self._device, self._dtype = config, device, dtype
        self._max_batch_rows = max_batch_rows
        self._slots = checkpoint_slots(self._model)
        self._recorder = (
            RoutingRecorder(self._model, num_layers=config.num_hidden_layers) if return_routed_experts else None
        )
        self._unfit: str | None = "none were loaded yet"
        self._asleep = False
        self._policy_version = 0
        self._loads = 0
        self._gate = Gate()

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def max_positions(self) -> int:
        return self._config.max_position_embeddings

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int | None = None) -> None:
        with self._gate.held():
            self._require_awake()
            self._unfit = "a load of weights did not complete"
            try:
                with torch.no_grad():
                    load_into(self._model, self._slots, weights)
            except ValueError as error:
                self._unfit = f"the last load failed: {error}"
                raise
            self._unfit = None
            self._loads += 1
            self._policy_version = self._policy_version + 1 if version is None else version

    def weight(self, name: str) -> torch.Tensor:
        """The tensor of this Hugging Face name that the model computes with: the model's own memory."""
        return self._slots[name].of(self._model.state_dict())

    @property
    def control(self) -> None:
        return None

    def commit(self, version: int) -> None:
        raise AssertionError("got a commit, expected load_weights: the weights are in this object")

    def pause(self) -> None:
        self._gate.pause()

    def resume(self) -> None:
        self._gate.resume()

    def refuse(self, reason: str) -> None:
        self._unfit = reason

    def close(self) -> None:
        self._unfit = "the engine was closed"

    def sleep(self) -> None:
        with self._gate.held():
            if not self._asleep and self._device.type == "cuda":
                self._model.to("cpu")
                torch.cuda.empty_cache()
            self._asleep = True

    def wake(self) -> None:
        self._model.to(self._device)
        self._asleep = False

    def _require_awake(self) -> None:
        if self._asleep:
            raise ValueError("the rollout engine sleeps: call wake() first")

    def _require_fit(self) -> None:
        self._require_awake()
        if self._unfit is not None:
            raise ValueError(
                f"the rollout engine serves nothing, the weights are unfit: {self._unfit}; push them again"
            )

    @torch.inference_mode()
    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        for r, request in enumerate(requests):
            check_fits(len(request.prompt_token_ids), request.max_new_tokens, self.max_positions, f"request {r}")
            if request.max_new_tokens < 1:
                raise ValueError(f"request {r} wants {request.max_new_tokens} tokens; set rollout.max_new_tokens >= 1")
        # neighbours in this order share prompts (computed once) or at least lengths (little padding)
        order = sorted(
            range(len(requests)), key=lambda r: (len(requests[r].prompt_token_ids), requests[r].prompt_token_ids)
        )
        samples: dict[int, Sample] = {}
        with self._gate.drawing():
            self._require_fit()
            for start in range(0, len(order), self._max_batch_rows):
                batch = order[start : start + self._max_batch_rows]
                samples.update(zip(batch, self._decode([requests[r] for r in batch], sampling), strict=True))
        return [samples[r] for r in range(len(requests))]

    def _decode(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        prompts = list(dict.fromkeys(request.prompt_token_ids for request in requests))
        prompt_of = {prompt: p for p, prompt in enumerate(prompts)}
        limits_N = torch.tensor([request.max_new_tokens for request in requests], device=self._device)
        max_new = max(request.max_new_tokens for request in requests)
        stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=self._device)
        uniforms = UniformStreams([request.seed for request in requests], self._device)

        loads, versions_T = self._loads, np.zeros(max_new, np.int32)
        owner_N = torch.tensor([prompt_of[r.prompt_token_ids] for r in requests], device=self._device)
        logits_PV, lengths_P, cache = self._prefill(prompts, max_new)
        logits_RV, position_R = logits_PV[owner_N], lengths_P[owner_N]
        cache.select_rows(owner_N)
        routed = None if self._recorder is None else RoutedTokens(self._recorder, owner_N, lengths_P, max_new)

        tokens_NT = torch.zeros(len(requests), max_new, dtype=torch.int64, device=self._device)
        logprobs_NT = torch.zeros(len(requests), max_new, dtype=torch.float32, device=self._device)
        lengths_N = limits_N.clone()
        stopped_N = torch.zeros(len(requests), dtype=torch.bool, device=self._device)
        # R rows are still in the batch; rows_R says which requests they answer, done_R which of them wait to be dropped
        rows_R = torch.arange(len(requests), device=self._device)
        done_R = torch.zeros(len(requests), dtype=torch.bool, device=self._device)
        for t in range(max_new):
            self._gate.step()
            self._require_fit()
            if self._loads != loads:
                keep = (~done_R).nonzero()[:, 0]
                rows_R, done_R, loads = rows_R[keep], done_R[keep], self._loads
                prefixes = [(*requests[n].prompt_token_ids, *tokens_NT[n, :t].tolist()) for n in rows_R.tolist()]
                logits_RV, position_R, cache = self._prefill(prefixes, max_new - t, max_mask=MASK_ELEMENTS)
            versions_T[t] = self._policy_version
            token_R, logprob_R = draw(sampling_logprobs(logits_RV, sampling), uniforms.at(t, rows_R))
            tokens_NT[rows_R, t], logprobs_NT[rows_R, t] = token_R, logprob_R
            stops_R = torch.isin(token_R, stop_ids) & ~done_R
            lengths_N[rows_R[stops_R]] = t + 1
            stopped_N[rows_R[stops_R]] = True
            done_R = done_R | stops_R | (limits_N[rows_R] == t + 1)
            alive = len(rows_R) - int(done_R.sum())
            if alive == 0:
                break
            if alive < COMPACT_BELOW * len(rows_R):
                keep = (~done_R).nonzero()[:, 0]
                rows_R, done_R, token_R, position_R = rows_R[keep], done_R[keep], token_R[keep], position_R[keep]
                cache.select_rows(keep)
            logits_RV = self._forward(token_R[:, None], position_R[:, None], cache, cache.pad_bias)[:, 0]
            position_R = position_R + 1
            if routed is not None:
                routed.add(t, rows_R)
        drawn = (tokens_NT.cpu(), logprobs_NT.cpu(), versions_T)
        return self._samples(*drawn, lengths_N.tolist(), stopped_N.tolist(), routed)

    def _samples(
        self,
        tokens_NT: torch.Tensor,
        logprobs_NT: torch.Tensor,
        versions_T: np.ndarray,
        lengths: list[int],
        stopped: list[bool],
        routed: RoutedTokens | None,
    ) -> list[Sample]:
        return [
            Sample(
                token_ids=tokens_NT[n, :length].numpy().copy(),
                logprobs=logprobs_NT[n, :length].numpy().copy(),
                finish_reason="stop" if stopped[n] else "length",
                versions_T=versions_T[:length].copy(),
                routed_experts=None if routed is None else routed.of(n, length).numpy(),
            )
            for n, length in enumerate(lengths)
        ]

    def _new_cache(self, max_tokens: int, pad_bias: torch.Tensor | None) -> SlabCache:
        return SlabCache(num_layers=self._config.num_hidden_layers, max_tokens=max_tokens, pad_bias=pad_bias)

    def _prefill(
        self, prompts: Sequence[tuple[int, ...]], max_new: int, max_mask: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, SlabCache]:
        """Logits [P, V] after each prompt (left-padded), prompt lengths [P], and the cache of all prompts.

        max_mask: elements of the mask of one pass; more than one pass where the prompts need more. None: one pass.
        """
        width = max(map(len, prompts))
        ids_PT = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=self._device)
        lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        slots_T = torch.arange(width + max_new, device=self._device)
        padding_PT = slots_T < (width - lengths_P)[:, None]
        padded = bool(padding_PT.any())
        cache = self._new_cache(width + max_new, self._bias(padding_PT[:, None, None, :]) if padded else None)
        positions_PT = (slots_T[:width] - (width - lengths_P)[:, None]).clamp(min=0)
        # without padding no mask is needed: the kernel knows the causal one
        chunk = width if max_mask is None or not padded else max(1, min(width, max_mask // (len(prompts) * width)))
        logits_PTV = torch.empty(0)
        for start in range(0, width, chunk):
            queries = slots_T[start : min(start + chunk, width)]
            mask = None
            if padded:
                hidden_PtT = (slots_T[:width] > queries[:, None]) | padding_PT[:, None, :width]
                # a padding token sees itself: some attention kernels answer a softmax over nothing with NaN
                hidden_PtT = hidden_PtT & (slots_T[:width] != queries[:, None])
                mask = self._bias(hidden_PtT[:, None])
            logits_PTV = self._forward(ids_PT[:, queries], positions_PT[:, queries], cache, mask, logits_to_keep=1)
        return logits_PTV[:, -1], lengths_P, cache

    def _bias(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)

    def _forward(
        self,
        ids_RT: torch.Tensor,
        positions_RT: torch.Tensor,
        cache: SlabCache,
        mask: torch.Tensor | None,
        logits_to_keep: int = 0,
    ) -> torch.Tensor:
        """Logits [R, T, V] (the last ``logits_to_keep`` positions, 0: all); extends the cache by these tokens."""
        return self._model(
            input_ids=ids_RT,
            position_ids=positions_RT,
            attention_mask=None if mask is None else mask[..., : cache.length + ids_RT.shape[1]],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        ).logits

    @torch.inference_mode()
    def score(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        with self._gate.held():
            return self._score(sequences, temperature)

    def _score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[np.ndarray]:
        self._require_fit()
        for n, (prompt, completion) in enumerate(sequences):
            check_fits(len(prompt), len(completion), self.max_positions, f"sequence {n}")
        order = sorted(range(len(sequences)), key=lambda n: len(sequences[n][0]) + len(sequences[n][1]))
        scores: dict[int, np.ndarray] = {}
        num_rows = min(self._max_batch_rows, max(1, SCORE_LOGITS // (SCORE_CHUNK_TOKENS * self._config.vocab_size)))
        for start in range(0, len(order), num_rows):
            batch = order[start : start + num_rows]
            rows = [[*sequences[n][0], *sequences[n][1]] for n in batch]
            logprobs_NT = torch.cat(list(self._row_logprobs(rows, temperature)), dim=1).cpu().numpy()
            for n, row, logprobs_T in zip(batch, rows, logprobs_NT, strict=True):
                scores[n] = logprobs_T[len(sequences[n][0]) - 1 : len(row) - 1].copy()
        return [scores[n] for n in range(len(sequences))]

    def _row_logprobs(self, rows: Sequence[Sequence[int]], temperature: float) -> Iterator[torch.Tensor]:
        """Chunks [N, t] of the log-probabilities [N, T - 1] of tokens 1.. of right-padded rows, through the cache."""
        width = max(map(len, rows))
        ids_NT = torch.tensor([list(row) + [0] * (width - len(row)) for row in rows], device=self._device)
        slots_T = torch.arange(width, device=self._device)
        cache = self._new_cache(width, None)
        chunk = max(1, SCORE_LOGITS // (len(rows) * self._config.vocab_size))
        for start in range(0, width - 1, chunk):
            queries = slots_T[start : min(start + chunk, width - 1)]
            mask = self._bias((slots_T > queries[:, None])[None, None])
            logits_NtV = self._forward(ids_NT[:, queries], queries.expand(len(rows), -1), cache, mask).float()
            logprobs_NtV = logits_NtV.div_(temperature).log_softmax(-1)
            yield logprobs_NtV.gather(-1, ids_NT[:, queries + 1, None])[..., 0]


def _require_full_attention(config: PretrainedConfig) -> None:
    """ValueError when some layer does not see the whole past: the engine's masks and cache know nothing else."""
    options = config.to_dict()
    kinds = set(options.get("layer_types") or ["full_attention"]) - {"full_attention"}
    if not options.get("layer_types") and options.get("sliding_window"):
        kinds = {"sliding_attention"}
    if kinds:
        raise ValueError(
            f"the transformers engine holds full attention only, but {config.model_type} has layers of type "
            f"{', '.join(sorted(kinds))}; choose another rollout.engine or model"
        )

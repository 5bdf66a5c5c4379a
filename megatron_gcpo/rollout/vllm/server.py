"""The rollout engine behind URLs: vLLM servers, on this machine or others, one or many for a replica of the trainer."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from transformers import PretrainedConfig

from megatron_gcpo.config.records import RolloutConfig
from megatron_gcpo.rollout.engine import Sample, SampleRequest, Sampling, WeightControl, check_fits
from megatron_gcpo.rollout.vllm.arguments import DTYPES, TRANSFER
from megatron_gcpo.rollout.vllm.contract import Expected
from megatron_gcpo.rollout.vllm.http import BadAnswer, Loop, NoAnswer, Rejected, open_session
from megatron_gcpo.rollout.vllm.local import read_api_key
from megatron_gcpo.rollout.vllm.quantize import quantized
from megatron_gcpo.rollout.vllm.replica import Replica
from megatron_gcpo.rollout.vllm.replicas import Question, Replicas
from megatron_gcpo.rollout.vllm.requests import sampling_params, scoring_params
from megatron_gcpo.rollout.vllm.server_control import HttpControl

ASK_AGAIN_AFTER_S = 10.0
"""A server that is out is not looked for more often: one whose machine is gone would hold up every push."""


class ServerEngine:
    """A RolloutEngine over vLLM servers; several threads may use it at once.

    A server that dies, stalls or answers nonsense is left out, and what it owed is asked of the others with the same
    seeds. One that is back holds random weights, so it stays out until the next push, which takes it in. The weights of
    every token are named by its server: an answer drawn from others than ours is never used.

    Args:
        urls: base URLs of this engine's own servers.
        hf_config: of the policy.
        max_positions: tokens of the longest sequence, prompt and completion.

    Raises:
        ValueError: a server does not come up in time, is no vLLM server, or does not fit the configuration.
    """

    def __init__(
        self,
        urls: Sequence[str],
        hf_config: PretrainedConfig,
        rollout: RolloutConfig,
        *,
        dtype: str,
        max_positions: int,
    ) -> None:
        self._rollout, self._max_positions = rollout, max_positions
        self._expected = Expected(
            max_positions=max_positions,
            dtype=DTYPES[dtype],
            vocab_size=hf_config.get_text_config().vocab_size,
            tensor_parallel_size=rollout.vllm.tensor_parallel_size,
            quantized=rollout.quantization != "none",
            transfer_backend=TRANSFER,
            routed_experts=rollout.router_replay,
        )
        self._loop = Loop()
        self._end = weakref.finalize(self, _close, self._loop, sessions := [])
        self._scoring = threading.Lock()
        self._control: HttpControl | None = None
        self._generations: tuple[int, ...] = ()
        self._unfit: str | None = "none were loaded yet"
        self._asleep = False
        self._policy_version = 0
        api_key = read_api_key(rollout.vllm.api_key_file)
        try:
            self._replicas = self._loop.run(self._attach_all(urls, api_key, sessions))
        except BaseException:
            self._end()
            raise

    async def _attach_all(self, urls: Sequence[str], api_key: str | None, sessions: list) -> Replicas:
        session = await open_session(api_key)
        sessions.append(session)
        nonce = secrets.token_hex(8)
        replicas = [Replica(url, session, nonce) for url in urls]
        wait_s = self._rollout.vllm.start_timeout_s
        await asyncio.gather(*(replica.attach(self._expected, wait_s=wait_s) for replica in replicas))
        return Replicas(replicas, self._rollout.vllm, capacity=self._rollout.max_batch_rows)

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def max_positions(self) -> int:
        return self._max_positions

    def generate(self, requests: Sequence[SampleRequest], sampling: Sampling) -> list[Sample]:
        self._require_fit()
        questions = []
        for r, request in enumerate(requests):
            check_fits(len(request.prompt_token_ids), request.max_new_tokens, self._max_positions, f"request {r}")
            if request.max_new_tokens < 1:
                raise ValueError(f"request {r} wants {request.max_new_tokens} tokens; set rollout.max_new_tokens >= 1")
            who = f"request {r}"
            questions.append(
                Question(
                    body={
                        "token_ids": [int(token) for token in request.prompt_token_ids],
                        "sampling_params": sampling_params(request, sampling),
                    },
                    read=lambda replica, answer, r=request, who=who: replica.read_sample(
                        answer, len(r.prompt_token_ids), who
                    ),
                    who=who,
                )
            )
        return self._loop.run(self._replicas.answer(questions))

    def score(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """As the protocol says. During a pause, requests under way advance meanwhile: a server serves all or none."""
        self._require_fit()
        questions = []
        for n, (prompt, completion) in enumerate(sequences):
            check_fits(len(prompt), len(completion), self._max_positions, f"sequence {n}")
            who = f"sequence {n}"
            token_ids = [int(token) for token in (*prompt, *completion)]  # arrays' integers are none for JSON
            questions.append(
                Question(
                    body={"token_ids": token_ids, "sampling_params": scoring_params()},
                    read=lambda replica, answer, p=prompt, c=completion, who=who: replica.read_scores(
                        answer, p, c, who
                    ),
                    who=who,
                    score_temperature=temperature,
                )
            )
        with self._scoring:  # the temperature is a setting of the workers, not of a request
            return self._loop.run(self._score(questions))

    async def _score(self, questions: Sequence[Question]) -> list[np.ndarray]:
        paused = self._replicas.is_paused
        if paused:
            await self._replicas.resume()
        try:
            return await self._replicas.answer(questions)
        finally:
            if paused:
                await self._replicas.pause()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int | None = None) -> None:
        from megatron_gcpo.reshard import deliver

        self._require_awake()
        version = self._policy_version + 1 if version is None else version
        try:
            control = self._current_control()
            stream = quantized(weights, self._rollout.quantization)
            deliver(control, stream, version=version, push=self._rollout.push)
        except ValueError as error:
            self.refuse(f"the last load failed: {error}")
            raise
        self.commit(version)

    @property
    def control(self) -> WeightControl | None:
        """The servers that are alive now, those that are back included. Raises ValueError when there are none."""
        # int8 weights are quantised whole, on their way through load_weights
        return None if self._rollout.quantization == "int8" else self._current_control()

    def _current_control(self) -> HttpControl:
        members = self._loop.run(self._meet())
        generations = tuple(replica.generation if replica in members else 0 for replica in self._replicas.all)
        if self._control is None or generations != self._generations:
            timeout_s = self._rollout.vllm.request_timeout_s
            self._control = HttpControl(
                self._loop, self._replicas, members, begin=self._begin_update, timeout_s=timeout_s
            )
            self._generations = generations
        return self._control

    async def _meet(self) -> list[Replica]:
        """Look at every server: which are alive, and are they still who they were?"""

        async def look(replica: Replica) -> None:
            try:
                if replica.state != "out" and not await replica.is_same_process():
                    await self._replicas.leave(replica, "it was started again")
                if replica.state == "out" and time.monotonic() >= replica.ask_again_s:
                    await replica.attach(self._expected, wait_s=0)
            except (NoAnswer, BadAnswer, Rejected) as error:
                await self._replicas.leave(replica, str(error))
                replica.leave(str(error))
                replica.ask_again_s = time.monotonic() + ASK_AGAIN_AFTER_S

        await asyncio.gather(*(look(replica) for replica in self._replicas.all))
        if not self._replicas.reachable:
            raise ValueError(self._replicas.describe())
        return self._replicas.reachable

    def _begin_update(self) -> None:
        self._require_awake()
        assert self._control is not None, "got a push without a control, expected one"
        if not self._replicas.is_paused and any(replica.in_flight for replica in self._control.members):
            raise ValueError("weights were pushed while tokens are being drawn: pause() the rollout engine first")
        self._unfit = "a load of weights did not complete"
        for replica in self._replicas.serving:
            replica.state = "unverified"

    def commit(self, version: int) -> None:
        """As the protocol says; a server that is lost now stays out. Raises ValueError when none is left."""
        assert self._control is not None, "got a commit without a push, expected control() before"
        self._loop.run(self._admit(self._control.members, version))
        if not self._replicas.serving:
            self.refuse(self._replicas.describe())
            raise ValueError(self._replicas.describe())
        self._policy_version, self._unfit = version, None

    async def _admit(self, members: Sequence[Replica], version: int) -> None:
        async def admit(replica: Replica) -> None:
            try:
                if not await replica.is_same_process():
                    raise BadAnswer(f"{replica.url} was started again in the middle of a push")
                await replica.relabel(version)
                # cached prefixes were computed with the weights that are gone
                cleared = await replica.call("/reset_prefix_cache", {}, query={"reset_running_requests": "true"})
                if not cleared["success"]:
                    raise BadAnswer(f"{replica.url} did not forget its cached prefixes")
                self._replicas.admit(replica)
            except (NoAnswer, BadAnswer, Rejected) as error:
                await self._replicas.leave(replica, str(error))

        await asyncio.gather(*(admit(replica) for replica in members if replica.state != "out"))
        self._replicas.accept()

    def pause(self) -> None:
        self._loop.run(self._replicas.pause())

    def resume(self) -> None:
        self._loop.run(self._replicas.resume())

    def refuse(self, reason: str) -> None:
        self._unfit = reason
        if self._end.alive:
            self._loop.call_soon(self._replicas.refuse, _unfit_message(reason))

    def sleep(self) -> None:
        """The servers have devices of their own: there is nothing to give back, but the protocol holds."""
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def close(self) -> None:
        """Break off what is under way and the connections; the servers live on."""
        self._unfit = "the engine was closed"
        self._end()

    def _require_awake(self) -> None:
        if self._asleep:
            raise ValueError("the rollout engine sleeps: call wake() first")

    def _require_fit(self) -> None:
        self._require_awake()
        if self._unfit is not None:
            raise ValueError(_unfit_message(self._unfit))


def _unfit_message(reason: str) -> str:
    return f"the rollout engine serves nothing, the weights are unfit: {reason}; push them again"


def _close(loop: Loop, sessions: list) -> None:
    for session in sessions:
        loop.run(session.close())
    loop.close()

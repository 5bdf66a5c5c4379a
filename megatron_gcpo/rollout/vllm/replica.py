"""One rollout server: what it must be, whose weights it holds, and what its answers mean."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import aiohttp
import numpy as np

from megatron_gcpo.rollout.engine import Sample
from megatron_gcpo.rollout.vllm.capabilities import TESTED
from megatron_gcpo.rollout.vllm.contract import GENERATE, NEEDED_PATHS, Expected, differences
from megatron_gcpo.rollout.vllm.http import BadAnswer, NoAnswer, Rejected, call
from megatron_gcpo.rollout.vllm.requests import padded_experts, sample_of

log = logging.getLogger(__name__)

QUICK_S = 30.0
"""For a question that a living server answers at once, also when it is busy."""
NO_WAIT_S = 2.0
POLL_S = 0.5
SAY_WAITING_AFTER_S = 10.0
NOT_FINITE = -9999.0
"""What vLLM's HTTP layer writes for a log-probability that JSON cannot hold."""


class Replica:
    """A server by its URL. All methods belong to the event loop's thread.

    ``label`` is what the server must call its weights: ours carry a nonce of this engine, so that a server that was
    started again (its weights are random numbers) or that somebody else pushed to gives itself away in every answer.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, nonce: str) -> None:
        self.url = url.rstrip("/")
        self.state: Literal["out", "unverified", "serving"] = "out"
        """unverified: alive, but no complete push was verified on it since it started."""
        self.out_because = "it was not asked yet"
        self.ask_again_s = 0.0
        """While it is out: when to look for it next (time.monotonic)."""
        self.num_workers = 0
        self.max_model_len = 0
        self.in_flight = 0
        self.score_temperature = 1.0
        self.generation = 0
        """How often we met it: another number, another process."""
        self.lock = asyncio.Lock()
        """Held while something is asked or set for all requests alike: whether it is alive, how it scores."""
        self._session, self._nonce, self._label = session, nonce, ""

    def leave(self, because: str) -> None:
        self.state, self.out_because = "out", because

    async def call(
        self, path: str, body: Any = None, *, query: Mapping[str, str] | None = None, timeout_s: float | None = QUICK_S
    ) -> Any:
        """See ``http.call``."""
        return await call(self._session, self.url + path, body=body, query=query, timeout_s=timeout_s)

    async def attach(self, expected: Expected, *, wait_s: float) -> None:
        """Wait until the server is up, and check that it is what we expect; it is ``unverified`` afterwards.

        Raises:
            ValueError: it did not come up in time, or is something else, or lacks something, and what.
        """
        await self._wait_until_up(wait_s)
        version = await self._version()
        await self._check_paths(version)
        info = await self.call("/server_info", query={"config_format": "json"}, timeout_s=60)
        problems = list(differences(info, expected))
        if problems:
            raise Rejected(f"the rollout server {self.url} does not fit the configuration: {'; '.join(problems)}")
        self.max_model_len = int(info["vllm_config"]["model_config"]["max_model_len"])
        self.num_workers = int(_field(await self.call("/get_world_size"), "world_size", self.url))
        await self.call("/resume", {})  # a trainer that died may have left it paused
        await self.set_score_temperature(1.0)
        await self._check_vocabulary(expected.vocab_size)
        await self.relabel("attached")
        self.state, self.generation = "unverified", self.generation + 1

    async def _wait_until_up(self, wait_s: float) -> None:
        start_s, said = time.monotonic(), False
        while True:
            try:
                # whoever does not want to wait has others: a machine that is gone must not hold up every push
                await self.call("/health", timeout_s=QUICK_S if wait_s else NO_WAIT_S)
                return
            except (NoAnswer, BadAnswer) as error:
                waited_s = time.monotonic() - start_s
                # only "nothing listens yet" may mend itself, and a server that starts or ends
                if isinstance(error, BadAnswer) and " answered 503" not in str(error):
                    raise Rejected(f"{self.url} is not a vLLM server: {error}") from None
                if waited_s >= wait_s:
                    raise NoAnswer(
                        f"no rollout server at {self.url}: {error}; waited {wait_s:g} s (rollout.vllm.start_timeout_s). "
                        "Start it with `megatron-gcpo serve RECIPE`, or correct rollout.vllm.urls"
                    ) from None
                if waited_s > SAY_WAITING_AFTER_S and not said:
                    log.warning("waiting for the rollout server %s", self.url)
                    said = True
            await asyncio.sleep(POLL_S)

    async def _version(self) -> str:
        try:
            version = _field(await self.call("/version"), "version", self.url)
        except BadAnswer as error:
            raise Rejected(f"{self.url} is not a vLLM server: {error}") from None
        if not version.startswith(TESTED + "."):
            log.warning("%s runs vLLM %s; the engine was tested with %s", self.url, version, TESTED)
        return version

    async def _check_paths(self, version: str) -> None:
        try:
            known = _field(await self.call("/openapi.json"), "paths", self.url)
        except BadAnswer as error:
            raise Rejected(f"{self.url} does not list what it can do: {error}; {_START_IT}") from None
        missing = [path for path in NEEDED_PATHS if path not in known]
        if missing:
            raise Rejected(
                f"the rollout server {self.url} (vLLM {version}) lacks {', '.join(missing)}: {_START_IT}; the engine was "
                f"tested with vLLM {TESTED}"
            )

    async def _check_vocabulary(self, vocab_size: int) -> None:
        """The server tells its vocabulary only by what it accepts: the last id of ours, and not one more."""
        for last, token_id in ((True, vocab_size - 1), (False, vocab_size)):
            params = {"max_tokens": 1, "allowed_token_ids": [token_id], "ignore_eos": True, "detokenize": False}
            try:
                await self.call(GENERATE, {"token_ids": [0], "sampling_params": params}, timeout_s=60)
                accepted = True
            except Rejected:
                accepted = False
            if accepted != last:
                raise Rejected(
                    f"the rollout server {self.url} holds a model with a {'smaller' if last else 'larger'} vocabulary "
                    f"than the policy's {vocab_size}: start it with `megatron-gcpo serve` and the same recipe"
                )

    async def relabel(self, name: object) -> None:
        """Call the weights that the server holds ``name`` from now on."""
        self._label = self.label_of(name)
        await self.call("/update_weight_version", {"new_version": self._label})

    def label_of(self, name: object) -> str:
        return f"{self._nonce}.{name}"

    async def finish_update(self, version: int, timeout_s: float) -> None:
        self._label = self.label_of(version)
        await self.call("/finish_weight_update", {"weight_version": self._label}, timeout_s=timeout_s)

    async def is_same_process(self, timeout_s: float = QUICK_S) -> bool:
        """Whether it still holds what it was given. Raises NoAnswer, BadAnswer."""
        await self.call("/health", timeout_s=timeout_s)
        answer = await self.call("/weight_info", timeout_s=timeout_s)
        return _field(answer, "weight_version", self.url) == self._label

    async def set_score_temperature(self, temperature: float) -> None:
        """Raises Rejected when the workers run without our extension."""
        try:
            await self.call(
                "/collective_rpc", {"method": "set_score_temperature", "kwargs": {"temperature": temperature}}
            )
        except BadAnswer as error:
            raise Rejected(
                f"the workers of {self.url} do not know set_score_temperature: {error}; {_START_IT}, with the same version "
                "of megatron_gcpo"
            ) from None
        self.score_temperature = temperature

    def read_sample(self, answer: Any, num_prompt_tokens: int, who: str) -> Sample:
        """A completion. Raises BadAnswer when the answer is not one, or drawn from weights that we did not push."""
        with self._understanding(who):
            (choice,) = answer["choices"]
            token_ids = [int(token) for token in choice["token_ids"]]
            content, reason = choice["logprobs"]["content"], choice["finish_reason"]
            logprobs = [_finite(entry["logprob"]) for entry in content]
            scored_ids = [int(entry["token_id"]) for entry in content]
            spans = [(str(s["version"]), int(s["start"]), int(s["end"])) for s in choice["weight_versions"]]
            experts = padded_experts(_array(choice.get("routed_experts")), num_prompt_tokens + len(token_ids))
        if scored_ids != token_ids:
            raise BadAnswer(f"{self.url} answered {who} with log-probs of other tokens than it drew")
        ours = [(self._version_of(label), start, end) for label, start, end in spans]
        try:
            return sample_of(token_ids, logprobs, reason, ours, who, experts)
        except ValueError as error:
            raise BadAnswer(f"{self.url}: {error}") from None

    def read_scores(self, answer: Any, prompt: Sequence[int], completion: Sequence[int], who: str) -> np.ndarray:
        """[T] float32 log-probabilities of the completion. Raises BadAnswer, as ``read_sample``."""
        with self._understanding(who):
            scored = zip(completion, answer["prompt_logprobs"][len(prompt) :], strict=True)
            logprobs_T = np.array([_finite(entry[str(token)]["logprob"]) for token, entry in scored], np.float32)
            labels = [str(span["version"]) for span in answer["choices"][0]["weight_versions"]]
        for label in labels:
            self._version_of(label)
        if not np.isfinite(logprobs_T).all():
            raise BadAnswer(f"{self.url} scored {who} with log-probs that are not finite: its weights are unfit")
        return logprobs_T

    @contextlib.contextmanager
    def _understanding(self, who: str) -> Iterator[None]:
        try:
            yield
        except (TypeError, KeyError, IndexError, ValueError) as error:
            raise BadAnswer(
                f"{self.url} answered {who} with something that is no completion ({type(error).__name__}: {error})"
            ) from None

    def _version_of(self, label: str) -> str:
        """Our plain version number for what a server calls its weights."""
        prefix = self.label_of("")
        if not label.startswith(prefix) or not label.removeprefix(prefix).isdecimal():
            raise BadAnswer(
                f"{self.url} drew tokens from weights {label!r}, which this run did not push: it was started again, or "
                "another trainer uses it"
            )
        return label.removeprefix(prefix)


_START_IT = "start it with `megatron-gcpo serve` and the same recipe"


def _field(answer: Any, name: str, url: str) -> Any:
    if not isinstance(answer, dict) or name not in answer:
        raise BadAnswer(f"{url} answered {str(answer)[:100]!r}, which has no {name!r}")
    return answer[name]


def _finite(value: Any) -> float:
    return float(value) if float(value) > NOT_FINITE else float("nan")


def _array(encoded: str | None) -> np.ndarray | None:
    """vLLM sends arrays as .npy files in base 64."""
    return None if encoded is None else np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)

"""A rollout server without a model: it answers like vLLM's, and misbehaves on demand."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from megatron_gcpo.rollout.vllm.arguments import WORKER_EXTENSION
from megatron_gcpo.rollout.vllm.contract import NEEDED_PATHS

VOCAB_SIZE = 100
MODEL_FACTS = ("max_model_len", "logprobs_mode", "dtype", "quantization", "enable_return_routed_experts")
Behaviour = Callable[["FakeServer", web.Request, dict[str, Any]], Awaitable[web.StreamResponse | None]]
"""What happens to a request for tokens before it is answered; None: it is answered."""


def tokens_of(prompt: list[int], seed: int, count: int) -> list[int]:
    """The completion of a prompt: a function of prompt and seed, as on a real server with given weights."""
    digest = hashlib.sha256(f"{prompt} {seed}".encode()).digest()
    return [digest[t % 32] % VOCAB_SIZE for t in range(count)]


def logprob_of(token: int, temperature: float = 1.0) -> float:
    return -(token + 1) / temperature / 64


class FakeServer:
    """Listens on a port of this machine, in a thread of its own; ``start`` and ``kill`` may alternate."""

    def __init__(self, **options: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.options = {
            "max_model_len": 65,
            "logprobs_mode": "processed_logprobs",
            "dtype": "torch.float32",
            "quantization": None,
            "enable_return_routed_experts": False,
            "worker_extension_cls": WORKER_EXTENSION,
            "tensor_parallel_size": 1,
            "backend": "megatron_gcpo",
            "vocab_size": VOCAB_SIZE,
            "version": "0.32.0",
            "paths": {*NEEDED_PATHS},
            "api_key": None,
            **options,
        }
        self.behave: Behaviour | None = None
        self.asked: list[dict[str, Any]] = []
        """Every request for tokens since the first start."""
        self.log: list[str] = []
        """Paths of every other POST."""
        self.most_at_once = self._at_once = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.start()

    def start(self) -> None:
        """A new process: what the former one was given is forgotten."""
        self.label, self.temperature, self.is_paused = "default", 1.0, False
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(self._loop, started), daemon=True)
        self._thread.start()
        assert started.wait(10)

    def kill(self) -> None:
        """No answer is completed any more, and nobody listens."""
        loop = self._loop
        if loop is None:
            return
        self._loop = None
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(10)

    def _serve(self, loop: asyncio.AbstractEventLoop, started: threading.Event) -> None:
        asyncio.set_event_loop(loop)
        self._go_on = asyncio.Event()
        self._go_on.set()
        app = web.Application(middlewares=[self._authenticate])
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._transports: set[Any] = set()
        runner = web.AppRunner(app, access_log=None)
        loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        loop.run_until_complete(site.start())
        started.set()
        loop.run_forever()
        for transport in self._transports:
            transport.abort()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.wait_for(runner.cleanup(), 5))
        loop.close()

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self._transports.add(request.transport)
        key = self.options["api_key"]
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        body = await request.json() if request.can_read_body else {}
        if path == "/version":
            return web.json_response({"version": self.options["version"]})
        if path == "/openapi.json":
            return web.json_response({"paths": {known: {} for known in self.options["paths"]}})
        if path not in self.options["paths"]:
            return web.json_response({"detail": "Not Found"}, status=404)
        if path == "/inference/v1/generate":
            return await self._generate(request, body)
        if request.method == "POST":
            self.log.append(path)
        return self._control(path, body)

    def _control(self, path: str, body: dict[str, Any]) -> web.StreamResponse:
        answer: Any = {}
        if path == "/server_info":
            answer = {"vllm_config": self._describe()}
        elif path == "/get_world_size":
            answer = {"world_size": self.options["tensor_parallel_size"]}
        elif path == "/weight_info":
            answer = {"weight_version": self.label}
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/finish_weight_update":
            self.label = body["weight_version"]
        elif path == "/reset_prefix_cache":
            answer = {"success": True}
        elif path == "/pause":
            self.is_paused = True
            self._go_on.clear()
        elif path == "/resume":
            self.is_paused = False
            self._go_on.set()
        elif path == "/collective_rpc":
            if body["method"] == "set_score_temperature":
                self.temperature = body["kwargs"]["temperature"]
            elif body["method"] == "fail":
                return web.json_response({"error": {"message": "Worker failed with error 'oops'"}}, status=500)
            answer = {"results": [{"port": self.port}] * self.options["tensor_parallel_size"]}
        return web.json_response(answer)

    def _describe(self) -> dict[str, Any]:
        options = self.options
        return {
            "model_config": {k: options[k] for k in MODEL_FACTS},
            "parallel_config": {k: options[k] for k in ("worker_extension_cls", "tensor_parallel_size")},
            "weight_transfer_config": {"backend": options["backend"]},
        }

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        ids, params = body["token_ids"], body["sampling_params"]
        if any(token >= self.options["vocab_size"] for token in params.get("allowed_token_ids", ())):
            return web.json_response({"error": {"message": "Token id is out of vocabulary"}}, status=400)
        if self.label.endswith((".attached", "default")):  # the probes of an engine that introduces itself
            return web.json_response(self.completion(ids, params))
        self.asked.append(body)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if self.behave is not None and (response := await self.behave(self, request, body)) is not None:
                return response
            await asyncio.sleep(0.01)
            await self._go_on.wait()
        finally:
            self._at_once -= 1
        return web.json_response(self.completion(ids, params))

    def completion(self, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        """A right answer."""
        tokens = tokens_of(ids, params.get("seed", 0), params["max_tokens"])
        scored = None
        if "prompt_logprobs" in params:
            scored = [None, *({str(t): {"logprob": logprob_of(t, self.temperature)}} for t in ids[1:])]
        content = [{"token_id": t, "logprob": logprob_of(t), "top_logprobs": []} for t in tokens]
        choice = {
            "index": 0,
            "token_ids": tokens,
            "finish_reason": "length",
            "logprobs": {"content": content},
            "weight_versions": [{"version": self.label, "start": 0, "end": len(tokens)}],
        }
        return {"choices": [choice], "prompt_logprobs": scored}

"""Inside a rollout server that asks for a key: every path needs it, the development endpoints first of all.

vLLM's own check leaves out whatever is not under /v1 and /inference: weights, remote calls and pauses.
"""

from __future__ import annotations

import hmac
from typing import Any

OPEN_PATHS = ("/health",)
"""Answered to anybody: whether the server is alive, and nothing else."""


class KeyGuard:
    """ASGI middleware. The key is in vLLM's own setting VLLM_API_KEY; without one, everything is refused."""

    def __init__(self, app: Any) -> None:
        from vllm import envs

        self._app = app
        self._expected = f"Bearer {envs.VLLM_API_KEY}".encode() if envs.VLLM_API_KEY else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
        # other kinds of connection end here, unanswered

    def _may_pass(self, scope: Any) -> bool:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return self._expected is not None and hmac.compare_digest(given, self._expected)

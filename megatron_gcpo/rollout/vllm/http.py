"""JSON over HTTP to rollout servers: one event loop in a thread of its own, and failures told apart by what they mean."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

try:
    import aiohttp
except ModuleNotFoundError:  # the base installation has no use for it
    raise ValueError("rollout.engine=vllm_server needs the package aiohttp: run `make vllm`") from None

T = TypeVar("T")
KEEP_ALIVE_S = 2.0
"""Idle connections are dropped well before a server does it (5 s): one closed under a request looks like a dead server."""
MESSAGE_LIMIT = 400


class NoAnswer(ValueError):
    """Nothing listens, or the connection broke before the answer was complete."""


class Stalled(NoAnswer):
    """No answer by the deadline."""


class BadAnswer(ValueError):
    """The server failed, or answered something that makes no sense."""


class Rejected(ValueError):
    """The server understood the request and will not serve it: asking again or elsewhere changes nothing."""


class Loop:
    """An event loop in a daemon thread, so that blocking callers in any thread share connections."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-http", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end, from any other thread; an exception here (Ctrl-C) cancels the work."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call_soon(self, callback: Any, *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)

    def close(self) -> None:
        """Stop the thread; what is still running on it is cancelled."""
        if not self._thread.is_alive():
            return
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def open_session(api_key: str | None) -> aiohttp.ClientSession:
    """Connections without a limit of their own (how many requests a server gets at once is decided elsewhere)."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=aiohttp.ClientTimeout(total=None),
        # a proxy of the environment must not see tokens, and knows nothing of the machines of a run
        trust_env=False,
    )


async def call(
    session: aiohttp.ClientSession,
    url: str,
    *,
    body: Any = None,
    query: Mapping[str, str] | None = None,
    timeout_s: float | None,
) -> Any:
    """The JSON answer of POST (with a body) or GET (``body=None``); None for an empty answer.

    Raises:
        NoAnswer, Stalled, BadAnswer, Rejected: see there; each begins with the URL.
    """
    method = "GET" if body is None else "POST"
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.request(method, url, json=body, params=query, allow_redirects=False) as response,
        ):
            status, content = response.status, await response.read()
    except TimeoutError:
        raise Stalled(f"{url} did not answer within {timeout_s:g} s") from None
    except aiohttp.InvalidURL:
        raise Rejected(f"{url} is not a URL: write http://host:port in rollout.vllm.urls") from None
    except (aiohttp.ClientError, OSError) as error:
        raise NoAnswer(f"{url} cannot be reached ({_reason(error)})") from None
    return _read(url, status, content)


def _read(url: str, status: int, content: bytes) -> Any:
    if status in (401, 403):
        raise Rejected(f"{url} wants a key: set rollout.vllm.api_key_file to the file that the server was started with")
    if status >= 300:
        kind = Rejected if status in (400, 413, 422) else BadAnswer
        raise kind(f"{url} answered {status}: {_message(content)}")
    if not content:
        return None
    try:
        return json.loads(content)
    except ValueError:
        raise BadAnswer(f"{url} answered no JSON, but {_shorten(content.decode(errors='replace'))!r}") from None


def _message(content: bytes) -> str:
    """What an error answer says, without the envelope."""
    text = content.decode(errors="replace")
    try:
        value = json.loads(text)
    except ValueError:
        return _shorten(text)
    while isinstance(value, dict):
        value = next((value[key] for key in ("error", "message", "detail") if key in value), str(value))
    return _shorten(str(value))


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MESSAGE_LIMIT else text[:MESSAGE_LIMIT] + " ..."


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed before the answer"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error)
    return " ".join(str(error).split()) or type(error).__name__

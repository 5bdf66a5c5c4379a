"""Keeps rollout servers alive: starts them, watches them, starts those that died again, and ends them all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from megatron_gcpo.cluster.supervise import end_with_parent, noted_signals

POLL_S = 0.25
GRACE_S = 15.0
"""From the polite signal to SIGKILL."""
HEALTH_EVERY_S = 5.0
UNHEALTHY_S = 60.0
"""A server that was ready and then answered no health check for so long is ended and started again."""
MAX_RESTARTS = 5
"""In a row: a server that stayed ready for STABLE_S has them all again."""
STABLE_S = 600.0
FIRST_WAIT_S = 1.0
"""Before the first restart; twice as long before each further one."""
LAST_LINES = 15


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """How one server is started."""

    index: int
    host: str
    port: int
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path

    @property
    def url(self) -> str:
        """By which this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


@dataclass(eq=False)
class _Server:
    command: ServerCommand
    state: Literal["starting", "ready", "waiting", "given up"] = "waiting"
    process: subprocess.Popen[Any] | None = None
    since_s: float = 0.0
    """When the state began."""
    seen_s: float = 0.0
    """When it was last healthy."""
    asked_s: float = 0.0
    """When its health was last asked for."""
    restarts: int = 0
    was_ready: bool = False
    wait_s: float = 0.0
    """Before the next start."""


def keep(commands: Sequence[ServerCommand], *, start_timeout_s: float, console: Console) -> int:
    """Run the servers until a signal; returns the exit code: 0 after a signal, 1 when no server can be kept alive.

    A server that never became ready ends the whole: its command is wrong, and starting it again changes nothing. One that
    dies later is started again, MAX_RESTARTS times in a row.
    """
    keeper = Keeper(commands, start_timeout_s, console)
    with noted_signals() as received:
        try:
            while not received and keeper.step():
                time.sleep(POLL_S)
        finally:
            keeper.end()
    if received:
        console.print(f"stopped by {received[0].name}; all {len(commands)} servers have ended")
        return 0
    return 1


class Keeper:
    """``keep``, one look at a time."""

    def __init__(self, commands: Sequence[ServerCommand], start_timeout_s: float, console: Console) -> None:
        self._servers = [_Server(command=command) for command in commands]
        self._start_timeout_s, self._console = start_timeout_s, console
        self._told_ready = False

    def step(self) -> bool:
        """Look after every server once; False when there is nothing left to look after."""
        for server in self._servers:
            if server.state == "waiting" and time.monotonic() >= server.since_s + server.wait_s:
                self._start(server)
            elif server.state in ("starting", "ready") and not self._look(server):
                return False
        if not self._told_ready and all(server.state == "ready" for server in self._servers):
            self._told_ready = True
            urls = ", ".join(server.command.url for server in self._servers)
            self._console.print(f"ready: {len(self._servers)} servers ({urls}); Ctrl-C ends them", markup=False)
        return any(server.state != "given up" for server in self._servers)

    def end(self) -> None:
        """End every server and whatever it started."""
        processes = [server.process for server in self._servers if server.process is not None]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(POLL_S)
        for process in processes:
            _kill_group(process)

    def _start(self, server: _Server) -> None:
        command = server.command
        command.log_path.parent.mkdir(parents=True, exist_ok=True)
        with command.log_path.open("ab" if server.was_ready else "wb") as log:
            server.process = subprocess.Popen(
                command.argv,
                env=dict(command.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # with everything it starts it is one group, which Ctrl-C does not reach
                preexec_fn=end_with_parent,
            )
        self._enter(server, "starting")
        self._say(server, f"starting on {command.url} (log: {command.log_path})")

    def _look(self, server: _Server) -> bool:
        """False when everything must end."""
        assert server.process is not None, "got a server without a process, expected one that was started"
        now_s, code = time.monotonic(), server.process.poll()
        if code is not None:
            return self._lost(server, _describe_exit(code))
        if now_s - server.asked_s >= (HEALTH_EVERY_S if server.state == "ready" else 4 * POLL_S):
            server.asked_s = now_s
            if _is_healthy(server.command.url):
                server.seen_s = now_s
                if server.state == "starting":
                    self._say(server, f"ready after {now_s - server.since_s:.0f} s")
                    self._enter(server, "ready")
                    server.was_ready = True
        if server.state == "ready":
            if now_s - server.since_s > STABLE_S:
                server.restarts = 0
            if now_s - server.seen_s > UNHEALTHY_S:
                return self._lost(server, f"answered no health check for {UNHEALTHY_S:.0f} s")
        elif now_s - server.since_s > self._start_timeout_s:
            limit = f"{self._start_timeout_s:g} s (rollout.vllm.start_timeout_s)"
            return self._lost(server, f"was not ready within {limit}")
        return True

    def _lost(self, server: _Server, why: str) -> bool:
        assert server.process is not None, "got a server without a process, expected one that was started"
        _kill_group(server.process)
        if not server.was_ready:
            self._say(server, f"{why} before it was ready. Its last lines:")
            self._show_log(server)
            return False
        server.restarts += 1
        if server.restarts > MAX_RESTARTS:
            self._say(server, f"{why}, {MAX_RESTARTS} restarts in a row did not help: given up. Its last lines:")
            self._show_log(server)
            self._enter(server, "given up")
            return True
        server.wait_s = FIRST_WAIT_S * 2 ** (server.restarts - 1)
        self._say(
            server,
            f"{why}; starting it again in {server.wait_s:g} s ({server.restarts} of {MAX_RESTARTS}). It serves after the "
            "trainer's next push",
        )
        self._enter(server, "waiting")
        return True

    def _enter(self, server: _Server, state: Literal["starting", "ready", "waiting", "given up"]) -> None:
        server.state, server.since_s = state, time.monotonic()
        server.seen_s = server.since_s

    def _say(self, server: _Server, what: str) -> None:
        self._console.print(f"server {server.command.index}: {what}", markup=False)

    def _show_log(self, server: _Server) -> None:
        with contextlib.suppress(OSError):
            lines = server.command.log_path.read_text(errors="replace").splitlines()
            for line in lines[-LAST_LINES:]:
                self._console.print(f"    {line}", markup=False)


def _is_healthy(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would answer for it
    try:
        with opener.open(f"{url}/health", timeout=2) as response:
            return response.status == 200
    except (OSError, urllib.error.HTTPError, ValueError):
        return False


def _kill_group(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"

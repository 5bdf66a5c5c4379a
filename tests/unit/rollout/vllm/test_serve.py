"""Which servers a configuration asks for, who may talk to them, and that they are kept alive."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from megatron_gcpo.config import load
from megatron_gcpo.rollout.vllm import keeper
from megatron_gcpo.rollout.vllm.guard import KeyGuard
from megatron_gcpo.rollout.vllm.keeper import Keeper, ServerCommand
from megatron_gcpo.rollout.vllm.local import read_api_key
from megatron_gcpo.rollout.vllm.serve import (
    Wish,
    check_exposure,
    listening_places,
    serve,
    server_argv,
    share_devices,
)

RECIPE = "configs/recipe/vllm_cpu.yaml"

# --- which servers


def test_places() -> None:
    urls = ["http://127.0.0.1:8001", "http://192.0.2.1:8001", "http://localhost:8002/"]
    assert listening_places(urls, Wish()) == [("127.0.0.1", 8001), ("127.0.0.1", 8002)]
    assert listening_places(urls, Wish(port=9000, replicas=2)) == [("127.0.0.1", 9000), ("127.0.0.1", 9001)]
    assert listening_places(urls, Wish(replicas=2)) == [("127.0.0.1", 8001), ("127.0.0.1", 8002)]
    assert listening_places([], Wish(replicas=1, host="0.0.0.0")) == [("0.0.0.0", 8000)]


@pytest.mark.parametrize(
    ("urls", "wish", "message"),
    [
        ([], Wish(), r"none of rollout\.vllm\.urls \(empty\) is on this machine: .*--port PORT --replicas"),
        (["http://192.0.2.1:80"], Wish(), r"none of rollout\.vllm\.urls \(http://192\.0\.2\.1:80\)"),
        (["http://localhost:80", "http://127.0.0.1:80"], Wish(), "names a port of this machine twice"),
        ([], Wish(port=65535, replicas=2), "ends above 65535"),
    ],
)
def test_places_that_make_no_sense(urls: list[str], wish: Wish, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        listening_places(urls, wish)


def test_a_url_that_needs_more_than_the_loopback_needs_a_host() -> None:
    own = next(
        (a.address for nics in psutil.net_if_addrs().values() for a in nics if _is_outside(a)),
        None,
    )
    if own is None:
        pytest.skip("this machine has the loopback only")
    with pytest.raises(ValueError, match=rf"say --host {own}"):
        listening_places([f"http://{own}:8000"], Wish())
    assert listening_places([f"http://{own}:8000"], Wish(host=own)) == [(own, 8000)]


def _is_outside(address: Any) -> bool:
    return address.family == socket.AF_INET and not address.address.startswith("127.")


def test_exposure_needs_a_key_or_consent() -> None:
    check_exposure(["127.0.0.1", "localhost", "::1"], None, insecure=False)
    check_exposure(["0.0.0.0"], "key", insecure=False)
    check_exposure(["0.0.0.0"], None, insecure=True)
    for host in ("0.0.0.0", "192.0.2.1", "unknown host"):
        with pytest.raises(ValueError, match=r"set rollout\.vllm\.api_key_file .* or say --insecure"):
            check_exposure(["127.0.0.1", host], None, insecure=False)


def test_gpus_are_shared_out() -> None:
    assert share_devices("4, 5,6,7", 2, 2) == ["4,5", "6,7"]
    with pytest.raises(ValueError, match=r"2 servers .*_size 2 need 4 GPUs, and 3 are visible"):
        share_devices("0,1,2", 2, 2)


def test_command_line() -> None:
    engine = {
        "max_model_len": 9,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "weight_transfer_config": {"a": 1},
    }
    argv = server_argv(engine, host="h", port=7, guarded=True)
    options = " ".join(argv[3:])
    assert options.startswith("--host h --port 7 --tokens-only")
    assert "--max-model-len 9 --enforce-eager --no-enable-prefix-caching" in options
    assert argv[-2:] == ["--weight-transfer-config", '{"a": 1}']
    assert "--middleware megatron_gcpo.rollout.vllm.guard.KeyGuard" in options
    assert "--middleware" not in server_argv(engine, host="h", port=7, guarded=False)


def test_another_engine_has_no_servers(tmp_path: Path) -> None:
    config = load("configs/recipe/quickstart.yaml")
    with pytest.raises(ValueError, match=r"rollout\.engine is transformers: set it to vllm_server"):
        serve(config, tmp_path, Wish(), {}, dry_run=True)


def test_key_is_not_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm", reason="vLLM comes with `make vllm`")
    key = tmp_path / "key"
    key.write_text("s3cret-word")
    config = load(RECIPE, [f"rollout.vllm.api_key_file={key}"])
    assert serve(config, tmp_path, Wish(), {}, dry_run=True) == 0
    printed = capsys.readouterr().out
    assert "--port 8731" in printed
    assert "KeyGuard" in printed
    assert "s3cret" not in printed


def test_keys(tmp_path: Path) -> None:
    assert read_api_key(None) is None
    path = tmp_path / "key"
    for content in ("", "two words", "schlüssel"):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match="one word in ASCII"):
            read_api_key(str(path))


# --- the guard


@pytest.mark.parametrize(
    ("path", "headers", "key", "passes"),
    [
        ("/health", {}, "word", True),
        ("/collective_rpc", {}, "word", False),
        ("/update_weights", {b"authorization": b"Bearer wor"}, "word", False),
        ("/update_weights", {b"authorization": b"word"}, "word", False),
        ("/update_weights", {b"authorization": b"Bearer word"}, "word", True),
        ("/health/../collective_rpc", {}, "word", False),
        ("/inference/v1/generate", {b"authorization": b"Bearer "}, "", False),
        ("/inference/v1/generate", {b"authorization": b"Bearer None"}, None, False),
    ],
)
def test_guard(
    monkeypatch: pytest.MonkeyPatch, path: str, headers: dict[bytes, bytes], key: str | None, passes: bool
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=SimpleNamespace(VLLM_API_KEY=key)))
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": list(headers.items())}
    asyncio.run(KeyGuard(app)(scope, None, send))
    assert bool(reached) == passes
    assert [m["status"] for m in sent if "status" in m] == ([] if passes else [401])


def test_guard_closes_other_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=SimpleNamespace(VLLM_API_KEY="word")))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("got a connection without the key")

    asyncio.run(KeyGuard(app)({"type": "websocket", "path": "/health", "headers": []}, None, None))


# --- keeping servers alive

SERVER = """
import http.server, pathlib, subprocess, sys
port, mode, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
starts = len(list(folder.glob("start*")))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / f"start{starts}").write_text(str(child.pid))
print("model loader: no such model", flush=True)
if mode == "broken":
    sys.exit(3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        if mode == "short-lived":
            sys.stdout.flush(); import os; os._exit(1)
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Keeper, io.StringIO]]]:
    monkeypatch.setattr(keeper, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(keeper, "GRACE_S", 5.0)
    keepers: list[Keeper] = []

    def build(*modes: str) -> tuple[Keeper, io.StringIO]:
        printed = io.StringIO()
        commands = [command(index, mode, tmp_path) for index, mode in enumerate(modes)]
        keepers.append(Keeper(commands, 30.0, Console(file=printed, width=400)))
        return keepers[-1], printed

    yield build
    for each in keepers:
        each.end()


def command(index: int, mode: str, folder: Path) -> ServerCommand:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = folder / f"server{index}"
    own.mkdir()
    return ServerCommand(
        index=index,
        host="127.0.0.1",
        port=port,
        argv=[sys.executable, "-c", SERVER, str(port), mode, str(own)],
        env={},
        log_path=own / "log",
    )


def turn(kept: Keeper, printed: io.StringIO, until: str) -> bool:
    deadline = time.monotonic() + 60
    while until not in printed.getvalue():
        assert time.monotonic() < deadline, printed.getvalue()
        if not kept.step():
            return False
        time.sleep(0.02)
    return True


def test_a_server_that_dies_is_started_again(make: Callable[..., Any], tmp_path: Path) -> None:
    kept, printed = make("good", "good")
    assert turn(kept, printed, "ready: 2 servers")
    first, second = (server.process for server in kept._servers)
    os.kill(first.pid, signal.SIGKILL)
    assert turn(kept, printed, "server 0: was killed by SIGKILL; starting it again in 0.01 s (1 of 5)")
    printed.truncate(0)
    assert turn(kept, printed, "server 0: ready after")
    assert second.poll() is None
    assert len(list((tmp_path / "server0").glob("start*"))) == 2
    pids = [int(path.read_text()) for path in tmp_path.glob("server*/start*")]
    wait_for(lambda: sum(_is_running(pid) for pid in pids) == 2)  # what the dead server had started has ended too
    kept.end()
    wait_for(lambda: not any(_is_running(pid) for pid in pids))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_server_that_never_starts_ends_all_and_shows_why(make: Callable[..., Any]) -> None:
    kept, printed = make("good", "broken")
    assert not turn(kept, printed, "never printed")
    assert "server 1: ended with exit code 3 before it was ready. Its last lines:" in printed.getvalue()
    assert "    model loader: no such model" in printed.getvalue()


def test_restarts_are_limited(make: Callable[..., Any], tmp_path: Path) -> None:
    kept, printed = make("short-lived")
    assert not turn(kept, printed, "never printed")
    assert "5 restarts in a row did not help: given up" in printed.getvalue()
    assert len(list((tmp_path / "server0").glob("start*"))) == 6


def test_servers_end_with_their_keeper_whatever_ends_it(tmp_path: Path) -> None:
    """SIGTERM: politely, exit code 0.  SIGKILL: the kernel tells the servers."""
    for how, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)):
        folder = tmp_path / how.name
        folder.mkdir()
        made = command(0, "good", folder)
        script = f"""
            from rich.console import Console
            from megatron_gcpo.rollout.vllm.keeper import ServerCommand, keep
            from pathlib import Path
            command = ServerCommand(index=0, host="127.0.0.1", port={made.port}, argv={list(made.argv)!r}, env={{}},
                                    log_path=Path({str(made.log_path)!r}))
            raise SystemExit(keep([command], start_timeout_s=60, console=Console(width=200)))
        """
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines = []
        while not (lines and lines[-1].startswith("ready")):
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        (server,) = psutil.Process(process.pid).children()
        process.send_signal(how)
        rest = process.stdout.read()
        assert process.wait(30) == code
        server.wait(30)
        if code == 0:
            assert "stopped by SIGTERM; all 1 servers have ended" in rest

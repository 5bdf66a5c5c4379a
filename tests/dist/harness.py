"""Run one function in N gloo processes from pytest.

    results = run_ranks(__file__, "my_worker", 4, {"size": 8}, tmp_path)

calls ``my_worker(size=8)`` on every rank and returns what each rank returned, rank by rank. The function finds its rank
with ``launch.worker_env()`` or ``topology.init`` (which may be called again after ``topology.close()``, with another
layout). Ranks are forked from one process per test session that has imported everything (preload.py): importing
Megatron costs seconds and a gigabyte, which the ranks then share. ``launch_ranks`` does the same through the package's own
launcher, for tests of that. Run pytest from the repository's root.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron_gcpo.cluster import failure, launch
from megatron_gcpo.config.records import ClusterConfig

SERVER_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
PATIENCE_S = 3.0
"""How long the other ranks may go on after one has failed, so that their own errors reach the logs."""


class RanksFailed(AssertionError):
    """A rank failed; the text holds the one line that the launcher would print, and the logs."""


def run_ranks(
    file: str, function: str, num_ranks: int, kwargs: dict[str, Any], folder: Path, *, timeout_s: int = 240
) -> list[Any]:
    """What ``function(**kwargs)`` of this file returned on each of ``num_ranks`` processes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = folder / "logs"
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", launch.PREFIX + "LOG_DIR": str(logs.resolve())}
    processes = fork_ranks(file, function, num_ranks, kwargs, folder, store.port, env, timeout_s)
    failed = _wait(processes)
    if failed:
        rank, why = failure.first_failure(logs, failed)
        raise RanksFailed(f"rank {rank}: {why}\nexit codes: {failed}\n{_tails(logs)}")
    return _results(folder, num_ranks)


def fork_ranks(
    file: str,
    function: str,
    num_ranks: int,
    kwargs: dict[str, Any],
    folder: Path,
    port: int,
    env: dict[str, str],
    timeout_s: int,
) -> list[Any]:
    """The started processes, for tests that watch them themselves; they write to ``folder/logs/rank<n>.log``.

    port: where they meet; env: more of what their starter tells them.
    """
    _write_call(folder, kwargs)
    (folder / "logs").mkdir(exist_ok=True)
    env = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **env}
    processes = []
    for rank in range(num_ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **env}
        processes.append(_server().Process(target=_rank, args=(own, file, function, str(folder), timeout_s)))
        processes[-1].start()
    return processes


def launch_ranks(
    file: str, function: str, num_ranks: int, kwargs: dict[str, Any], folder: Path, *, timeout_s: int = 240
) -> list[Any]:
    """:func:`run_ranks` through the package's own launcher."""
    _write_call(folder, kwargs)
    cluster = ClusterConfig.model_validate({"platform": "cpu", "processes_per_node": num_ranks})
    console = io.StringIO()
    argv = [file, function, str(folder), str(timeout_s)]
    with contextlib.redirect_stderr(console):
        code = launch.run(cluster, argv, log_dir=folder / "logs", module="tests.dist.harness")
    if code:
        raise RanksFailed(f"exit code {code}\n{console.getvalue()}\n{_tails(folder / 'logs')}")
    return _results(folder, num_ranks)


@functools.cache
def _server() -> Any:
    """The process that ranks are forked from; it ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.dist.preload"])
    with mock.patch.dict(os.environ, SERVER_ENVIRONMENT):
        multiprocessing.forkserver.ensure_running()
    return context


def _rank(env: dict[str, str], file: str, function: str, folder: str, timeout_s: int) -> None:
    os.setsid()  # one group with whatever it starts, to be ended together
    os.environ.update(env)
    with (Path(folder) / "logs" / f"rank{env['RANK']}.log").open("ab") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    sys.exit(launch.run_worker(lambda: _work(file, function, folder, timeout_s)))


def _wait(processes: list[Any]) -> dict[int, int]:
    """Until all have ended or one has failed, and then end the rest; the exit codes of those that failed."""
    failed: dict[int, int] = {}
    running = dict(enumerate(processes))
    while running:
        ended = multiprocessing.connection.wait([p.sentinel for p in running.values()], PATIENCE_S if failed else None)
        if not ended:
            break
        for rank in [rank for rank, p in running.items() if p.sentinel in ended]:
            process = running.pop(rank)
            process.join()
            if process.exitcode:
                failed[rank] = process.exitcode
    for process in running.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return failed


def _write_call(folder: Path, kwargs: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kwargs.pickle").write_bytes(pickle.dumps(kwargs))


def _results(folder: Path, num_ranks: int) -> list[Any]:
    return [pickle.loads((folder / f"result{rank}.pickle").read_bytes()) for rank in range(num_ranks)]


def _tails(logs: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(logs.glob("rank*.log")))


def _work(file: str, function: str, folder: str, timeout_s: int) -> None:
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    spec = importlib.util.spec_from_file_location("dist_worker", file)
    assert spec is not None, f"got {file}, expected a Python file"
    assert spec.loader is not None, f"got {file}, expected a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules["dist_worker"] = module
    spec.loader.exec_module(module)
    result = getattr(module, function)(**pickle.loads((Path(folder) / "kwargs.pickle").read_bytes()))
    (Path(folder) / f"result{launch.worker_env().rank}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    sys.exit(launch.run_worker(lambda: _work(*sys.argv[1:4], int(sys.argv[4]))))

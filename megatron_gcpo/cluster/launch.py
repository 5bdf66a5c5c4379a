"""How a run becomes processes. The only file that reads the environment.

``run`` is the parent: it starts this machine's ranks and supervises them. A process that a starter put in place (ours,
torchrun, or Slurm's srun) finds out who it is with ``worker_env`` and works inside ``run_worker``. ``connect``
meets the others.
"""

# pyright: reportPrivateImportUsage=false
# torch.distributed documents its stores without listing them as exported.

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron_gcpo.cluster import failure
from megatron_gcpo.cluster.grid import world_size
from megatron_gcpo.cluster.supervise import RankCommand, supervise

if TYPE_CHECKING:
    import torch.distributed as dist

    from megatron_gcpo.config.records import ClusterConfig

PREFIX = "MEGATRON_GCPO_"
LINGER_S = 5.0
"""More than two signs of life of deadline.Watch."""


@dataclass(frozen=True, kw_only=True)
class WorkerEnv:
    """Who this process is among the ranks of the run."""

    rank: int
    local_rank: int
    """Index on its machine: the CUDA device it takes."""
    world_size: int
    master_addr: str
    master_port: int
    """Where the ranks meet."""
    store_is_hosted: bool = False
    """True when the starter (torchrun) runs the meeting point itself; otherwise rank 0 does."""
    listen_fd: int | None = None
    """The socket of the meeting point, already bound by our parent; rank 0 of a local launch only."""
    lifeline_fd: int | None = None
    """A pipe that ends when our parent does; local launch only."""
    log_dir: Path | None = None
    """Where failures are recorded in a local launch."""


def inherited_environment() -> dict[str, str]:
    """What this process was started with, to be handed on to programs that it starts."""
    return dict(os.environ)


def is_worker() -> bool:
    """True when a starter put this process in place as a rank; False for a plain command line."""
    return "RANK" in os.environ or _is_slurm_task()


def worker_env() -> WorkerEnv:
    """Who this process is, from the variables of our parent, torchrun or srun.

    Raises ValueError when variables are missing.
    """
    return read_worker_env(os.environ)


def read_worker_env(env: Mapping[str, str]) -> WorkerEnv:
    """:func:`worker_env` of a given environment."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if "RANK" not in env and "SLURM_PROCID" in env:
        env = {**_from_slurm(env), **env}
    missing = [name for name in names if name not in env]
    if missing:
        raise ValueError(
            f"this process does not know its place among the ranks: {', '.join(missing)} not set; start it with "
            "megatron-gcpo, torchrun or srun"
        )
    listen_fd = env.get(PREFIX + "LISTEN_FD")
    lifeline_fd = env.get(PREFIX + "LIFELINE_FD")
    log_dir = env.get(PREFIX + "LOG_DIR")
    return WorkerEnv(
        rank=int(env["RANK"]),
        local_rank=int(env["LOCAL_RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        master_addr=env["MASTER_ADDR"],
        master_port=int(env["MASTER_PORT"]),
        store_is_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        listen_fd=int(listen_fd) if listen_fd else None,
        lifeline_fd=int(lifeline_fd) if lifeline_fd else None,
        log_dir=Path(log_dir) if log_dir else None,
    )


def run(cluster: ClusterConfig, argv: Sequence[str], *, log_dir: Path, module: str = "megatron_gcpo.cli") -> int:
    """Start ``python -m module *argv`` once per rank on this machine and wait; returns the exit code for the shell.

    Raises ValueError when the run spans several machines (each needs its own starter) or the port is taken.
    """
    if cluster.num_nodes > 1:
        raise ValueError(
            f"cluster.num_nodes is {cluster.num_nodes}: start the ranks of every machine yourself, e.g. on each: "
            f"torchrun --nnodes {cluster.num_nodes} --nproc-per-node {cluster.processes_per_node} --rdzv-backend c10d "
            f"--rdzv-endpoint FIRST_HOST:29500 -m {module} {' '.join(argv)}"
        )
    listener = _bind(cluster.master_port)
    lifeline_fd, our_end = os.pipe()
    try:
        commands = []
        for rank in range(world_size(cluster)):
            env = rank_environment(
                cluster,
                rank,
                os.environ,
                port=listener.getsockname()[1],
                listen_fd=listener.fileno(),
                lifeline_fd=lifeline_fd,
                log_dir=log_dir,
            )
            fds = (lifeline_fd, listener.fileno()) if rank == 0 else (lifeline_fd,)
            commands.append(
                RankCommand(rank=rank, argv=[sys.executable, "-m", module, *argv], env=env, inherited_fds=fds)
            )
        return supervise(commands, log_dir)
    finally:
        listener.close()
        os.close(lifeline_fd)
        os.close(our_end)


def rank_environment(
    cluster: ClusterConfig,
    rank: int,
    inherited: Mapping[str, str],
    *,
    port: int,
    listen_fd: int,
    lifeline_fd: int,
    log_dir: Path,
) -> dict[str, str]:
    """The environment of one rank of a local launch. What the user exported stays, except what defines the rank."""
    env = {
        # Without a resolvable host name gloo finds no address; ranks of one machine need only the loopback.
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        # The socket layer's warnings about host names, and its retries, say nothing that our errors do not.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Tokenizers' own threads warn, and deadlock, when a process that used them forks (the verifier pool does).
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **inherited,
        "OMP_NUM_THREADS": str(cluster.threads_per_process),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size(cluster)),
        "LOCAL_WORLD_SIZE": str(world_size(cluster)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        PREFIX + "LIFELINE_FD": str(lifeline_fd),
        PREFIX + "LOG_DIR": str(log_dir.resolve()),
    }
    env.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    env.pop(PREFIX + "LISTEN_FD", None)
    if rank == 0:
        env[PREFIX + "LISTEN_FD"] = str(listen_fd)
    if cluster.platform == "cpu":
        # Libraries that choose a device themselves must not find one either.
        env["CUDA_VISIBLE_DEVICES"] = ""
    if cluster.tensor_model_parallel_size > 1 or cluster.context_parallel_size > 1:
        # One hardware queue keeps kernels in launch order: Megatron-Core launches the communication of tensor and
        # context parallelism before the matrix product that hides it; with more queues the product may run first.
        # On a CPU it only silences the warning about that.
        env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return env


def run_worker(main: Callable[[], int | None]) -> int:
    """Run a rank's whole work; returns its exit code. A failure leaves one record and one line, never a hang.

    In a local launch the line is the parent's to print; under torchrun or srun every failing rank prints its own.
    """
    env = worker_env()
    _die_with_parent(env)
    try:
        return main() or 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        _report(env, failure.describe(error), error)
        if env.rank == 0 and env.log_dir is None and not env.store_is_hosted:
            # The store in which the other ranks read why the run ends lives as long as this process.
            time.sleep(LINGER_S)
        return 1


def abandon(message: str) -> NoReturn:
    """End this process from a thread while its main thread hangs in a collective that no exception can reach."""
    _report(worker_env(), message, None)
    sys.stderr.flush()
    os._exit(1)


@functools.cache
def connect(env: WorkerEnv, timeout: timedelta) -> dist.Store:
    """The key-value store through which all ranks meet, once all of them have come.

    One per process: its socket cannot be opened twice. Raises ValueError when it cannot be opened or reached, or when
    ranks are missing at the timeout (it says which).
    """
    import torch.distributed as dist

    where = f"{env.master_addr}:{env.master_port}"
    hosts = env.rank == 0 and not env.store_is_hosted
    try:
        store = dist.TCPStore(
            env.master_addr,
            env.master_port,
            is_master=hosts,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=env.listen_fd if hosts else None,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise ValueError(
                f"port {env.master_port} is in use: set MASTER_PORT (cluster.master_port) to another"
            ) from None
        raise ValueError(
            f"rank {env.rank} did not reach rank 0 at {where} within {timeout.total_seconds():g} s: did rank 0 start, "
            "and do MASTER_ADDR and MASTER_PORT name an address that this machine can reach?"
        ) from None
    keys = [f"joined/{rank}" for rank in range(env.world_size)]
    store.set(keys[env.rank], "1")
    try:
        store.wait(keys, timeout)
    except dist.DistError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise ValueError(
            f"rank {env.rank} waited {timeout.total_seconds():g} s at {where}, and of {env.world_size} ranks these did "
            f"not come: {', '.join(missing[:16])}{' ...' if len(missing) > 16 else ''}"
        ) from None
    return store


def _report(env: WorkerEnv, message: str, error: Exception | None) -> None:
    if env.log_dir is not None:
        failure.write(env.log_dir, env.rank, message, error)
        return
    if error is not None:
        import traceback

        traceback.print_exception(error)
    print(f"error: rank {env.rank}: {message}", file=sys.stderr, flush=True)


def _die_with_parent(env: WorkerEnv) -> None:
    """A rank whose parent is killed outright would hold memory and devices for ever, and so would what it started."""
    if env.lifeline_fd is None:
        return
    lifeline = env.lifeline_fd

    def wait_and_die() -> None:
        os.read(lifeline, 1)  # returns when the last writing end, which only the parent holds, is closed
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait_and_die, name="lifeline", daemon=True).start()


def _bind(port: int) -> socket.socket:
    """A listening socket for the meeting point, held from now on so that nobody takes the port meanwhile."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"port {port} cannot be used ({error.strerror}): set cluster.master_port to another, or to 0 for a free one"
        ) from None
    return listener


def _is_slurm_task() -> bool:
    """True inside an srun step of several tasks; a batch script that calls us directly is not one."""
    return "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def _from_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """The usual variables, from Slurm's: the first node of the step hosts the meeting point."""
    found = {
        "RANK": env.get("SLURM_PROCID"),
        "LOCAL_RANK": env.get("SLURM_LOCALID"),
        "WORLD_SIZE": env.get("SLURM_STEP_NUM_TASKS"),
        "MASTER_ADDR": first_host(env.get("SLURM_STEP_NODELIST", "")),
    }
    with contextlib.suppress(KeyError, ValueError):
        # The same on all nodes, and different for jobs that share a node.
        found["MASTER_PORT"] = str(20000 + int(env["SLURM_JOB_ID"]) % 20000)
    return {name: value for name, value in found.items() if value}


def first_host(nodelist: str) -> str:
    """The first name of a Slurm node list: ``gpu[003-010,12],login1`` -> ``gpu003``."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist)
    return "".join(part or "" for part in match.groups()) if match else ""

"""The launcher with real, small processes: one line per failure, and nobody left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from megatron_gcpo.cluster import failure, launch
from megatron_gcpo.config.records import ClusterConfig

RANKS = """
import os, subprocess, sys, time
from datetime import timedelta
from pathlib import Path
from megatron_gcpo.cluster import launch

what, folder = sys.argv[1], Path(sys.argv[2])
env = launch.worker_env()

def work():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    (folder / f"pids{env.rank}.tmp").write_text(f"{os.getpid()} {child.pid}")
    (folder / f"pids{env.rank}.tmp").rename(folder / f"pids{env.rank}")
    while not all((folder / f"pids{rank}").exists() for rank in range(env.world_size)):
        time.sleep(0.01)
    print("hello from", env.rank, flush=True)
    if what == "raise" and env.rank == 1:
        raise ValueError("no rows are left:\\nset data.on_bad_row=skip")
    if what == "kill" and env.rank == 1:
        os.kill(os.getpid(), 9)
    if what == "exit" and env.rank == 1:
        sys.exit(3)
    if what != "end":
        time.sleep(300)

sys.exit(launch.run_worker(work))
"""

PARENT = """
import sys
from datetime import timedelta
from pathlib import Path
from megatron_gcpo.cluster import launch
from megatron_gcpo.config.records import ClusterConfig

folder = sys.argv[1]
cluster = ClusterConfig(platform="cpu", processes_per_node=2)
sys.exit(launch.run(cluster, ["sleep", folder], log_dir=Path(folder) / "logs", module="ranks"))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "ranks.py").write_text(RANKS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(launch.__file__).parents[2]}")
    return tmp_path


def run(folder: Path, what: str, **options) -> int:
    cluster = ClusterConfig(platform="cpu", processes_per_node=2, **options)
    return launch.run(cluster, [what, str(folder)], log_dir=folder / "logs", module="ranks")


def everybody(folder: Path) -> list[int]:
    """The processes of both ranks and the ones they started."""
    return [int(pid) for rank in range(2) for pid in (folder / f"pids{rank}").read_text().split()]


def wait_until(condition, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """True when the process has ended, be it a zombie that nobody has collected."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return state == "" or state.startswith("Z")


def test_success_returns_zero_and_leaves_nobody(folder, capfd):
    assert run(folder, "end") == 0
    assert "hello from 0" in capfd.readouterr().out
    assert "hello from 1" in (folder / "logs" / "rank1.log").read_text()
    wait_until(lambda: all(map(is_gone, everybody(folder))))


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("raise", "no rows are left: set data.on_bad_row=skip"),
        ("kill", "was killed by SIGKILL (the kernel does this when memory runs out: see dmesg)"),
        ("exit", "exited with code 3"),
    ],
)
def test_a_failing_rank_ends_all_with_one_line(folder, capfd, what, why):
    assert run(folder, what) == 1
    log = folder / "logs" / "rank1.log"
    assert capfd.readouterr().err == f"error: rank 1: {why} (log: {log})\n"
    assert ("ValueError: no rows" in log.read_text()) == (what == "raise")
    wait_until(lambda: all(map(is_gone, everybody(folder))))


def test_records_of_an_earlier_run_do_not_count(folder, capfd):
    failure.write(folder / "logs", 0, "an old error", ValueError("an old error"))
    assert run(folder, "kill") == 1
    assert "rank 1: was killed" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_ranks_do_not_outlive_their_parent(folder, number, code):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: all((folder / f"pids{rank}").exists() for rank in range(2)))
    pids = everybody(folder)
    parent.send_signal(number)
    error = parent.communicate(timeout=30)[1]
    assert parent.returncode == code
    if number != signal.SIGKILL:
        assert error == f"stopped by {number.name}; all 2 ranks have ended\n"
    wait_until(lambda: all(map(is_gone, pids)))


def test_a_port_in_use_is_said_before_anything_starts(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} cannot be used .*in use.*: set cluster.master_port"):
            run(folder, "end", master_port=port)
    assert not (folder / "logs").exists()


def test_several_machines_need_their_own_starter(folder):
    with pytest.raises(ValueError, match=r"torchrun --nnodes 2 --nproc-per-node 2 .* -m ranks end"):
        run(folder, "end", num_nodes=2)


def test_environment_of_a_rank():
    def env(inherited, rank=1, **options):
        cluster = ClusterConfig(processes_per_node=4, threads_per_process=3, **options)
        return launch.rank_environment(
            cluster, rank, inherited, port=29, listen_fd=7, lifeline_fd=8, log_dir=Path("/logs")
        )

    mine = env({"OMP_NUM_THREADS": "64", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"})
    assert (mine["RANK"], mine["LOCAL_RANK"], mine["WORLD_SIZE"]) == ("1", "1", "4")
    assert mine["OMP_NUM_THREADS"] == "3"
    assert (mine["HF_HUB_OFFLINE"], mine["TOKENIZERS_PARALLELISM"]) == ("1", "true"), "what the user exported stays"
    assert env({})["TOKENIZERS_PARALLELISM"] == "false"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in mine
    assert env({}, tensor_model_parallel_size=2)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert env({"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == "0"
    assert env({"CUDA_VISIBLE_DEVICES": "0"}, platform="cpu")["CUDA_VISIBLE_DEVICES"] == ""
    read = launch.read_worker_env(env({"MEGATRON_GCPO_LISTEN_FD": "3"}, rank=0))
    assert (read.rank, read.master_port, read.listen_fd, read.log_dir) == (0, 29, 7, Path("/logs"))
    assert launch.read_worker_env(mine).listen_fd is None


def test_starters_other_than_ours():
    torchrun = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    env = launch.read_worker_env({**torchrun, "TORCHELASTIC_USE_AGENT_STORE": "True", "SLURM_PROCID": "0"})
    assert (env.rank, env.local_rank, env.world_size, env.store_is_hosted) == (5, 1, 8, True)
    srun = {
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_STEP_NODELIST": "gpu[003-004]",
        "SLURM_JOB_ID": "4200017",
    }
    env = launch.read_worker_env(srun)
    assert (env.rank, env.local_rank, env.world_size) == (9, 1, 16)
    assert (env.master_addr, env.master_port, env.store_is_hosted) == ("gpu003", 20017, False)
    with pytest.raises(ValueError, match="LOCAL_RANK, MASTER_PORT not set"):
        launch.read_worker_env({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[003-010,12],x", "gpu003"),
        ("a[7,9]-ib", "a7-ib"),
        ("rack-2-[10-12]", "rack-2-10"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodelist, host):
    assert launch.first_host(nodelist) == host


def test_the_cause_comes_before_its_consequences(tmp_path):
    failure.write(tmp_path, 0, "lost rank 2", failure.PeerLost("lost rank 2"))
    failure.write(tmp_path, 3, "lost rank 2", None)
    assert failure.first_failure(tmp_path, {0: 1, 3: 1}) == (0, "lost rank 2")
    assert failure.first_failure(tmp_path, {0: 1, 3: 1, 4: 7, 2: -11}) == (2, "was killed by SIGSEGV")
    failure.write(tmp_path, 1, "KeyError: 'x'", KeyError("x"))
    assert failure.first_failure(tmp_path, {0: 1, 1: 1, 2: -9}) == (1, "KeyError: 'x'")


def test_errors_become_one_line():
    assert failure.describe(ValueError("set\n  a.b\n=1")) == "set a.b =1"
    assert failure.describe(KeyError("x")) == "KeyError: 'x'"
    assert failure.describe(AssertionError()) == "AssertionError"
    assert len(failure.describe(RuntimeError("x" * 9999))) < 700


def lonely(port: int, **fields) -> launch.WorkerEnv:
    return launch.WorkerEnv(
        **{"rank": 0, "local_rank": 0, "world_size": 3, "master_addr": "127.0.0.1"} | fields, master_port=port
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_ranks_that_never_come_are_named():
    with pytest.raises(ValueError, match=r"rank 0 waited 0.3 s at .*, and of 3 ranks these did not come: 1, 2"):
        launch.connect(lonely(free_port()), timedelta(seconds=0.3))


def test_a_meeting_point_that_cannot_be_opened_or_reached_is_said():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is in use: set MASTER_PORT"):
            launch.connect(lonely(port), timedelta(seconds=1))
    with pytest.raises(ValueError, match=r"rank 1 did not reach rank 0 at 127.0.0.1:\d+ within 0.5 s"):
        launch.connect(lonely(free_port(), rank=1), timedelta(seconds=0.5))

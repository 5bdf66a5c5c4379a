"""What a parent starts does not outlive it."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

PARENT = """
import subprocess, sys, time
from megatron_gcpo.cluster.supervise import end_with_parent
child = subprocess.Popen(["sleep", "600"], preexec_fn=end_with_parent, start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a feature of Linux")
def test_a_child_ends_when_its_parent_is_killed_outright() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

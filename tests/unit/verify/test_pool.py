"""The pool itself: order, long-lived judges, lost workers, start-up errors, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_gcpo.config.records import VerifyConfig
from megatron_gcpo.types import Verdicts
from megatron_gcpo.verify.base import Sample
from megatron_gcpo.verify.pool import VerifierPool

from .support import TABLE, group, session_members

COUNT_UP = "import builtins\nbuiltins.n = getattr(builtins, 'n', 0) + 1\nreward = builtins.n / 1000"
ROOT = Path(__file__).resolve().parents[3]


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something comes true within a generous time."""
    for _ in range(3000):
        if holds():
            return True
        time.sleep(0.01)
    return False


def test_a_trusted_verifier_keeps_one_judge_for_all_samples() -> None:
    """200 rewards count up without a gap: one process judged them all, in order, and nothing was restarted."""
    with VerifierPool(VerifyConfig(name="lasting", num_workers=1), table=TABLE) as pool:
        verdicts = pool.score([group([COUNT_UP] * 8) for _ in range(25)])
        again = pool.score([group([COUNT_UP])])
        assert set(pool.counts.values()) == {0}
    rewards = np.concatenate([v.rewards_G for v in verdicts])
    np.testing.assert_array_equal(rewards, (np.arange(200, dtype=np.float32) + 1) / np.float32(1000))
    assert rewards.dtype == np.float32
    assert again[0].rewards_G[0] == np.float32(0.201)


def test_a_lasting_judge_is_replaced_after_what_it_does_not_survive() -> None:
    """Every loss starts the count anew, in the same worker."""
    texts = [COUNT_UP, COUNT_UP, "while True: pass", COUNT_UP, "import os\nos._exit(3)", COUNT_UP, "1 / 0", COUNT_UP]
    with VerifierPool(VerifyConfig(name="lasting", num_workers=1, timeout_s=2), table=TABLE) as pool:
        worker = pool._workers[0].pid
        verdict = pool.score([group(texts)])[0]
        assert pool._workers[0].pid == worker
        assert pool.counts["verify/restarts"] == 2
    assert verdict.statuses_G == ("ok", "ok", "timeout", "ok", "killed", "ok", "error", "ok")
    expected = np.array([1, 2, 0, 1, 0, 1, 0, 2], dtype=np.float32) / np.float32(1000)
    np.testing.assert_array_equal(verdict.rewards_G, expected)


def test_bodies_larger_than_a_pipe_and_odd_text_arrive() -> None:
    texts = [f"reward = float(len({'x' * size!r}) == {size})" for size in (0, 70_000, 1_000_000)]
    odd = "reward = float(extras['t'] == (1, '\\ud800', '\\0'))"
    with VerifierPool(VerifyConfig(name="lasting", num_workers=2), table=TABLE) as pool:
        large, strange, none = pool.score(
            [group(texts * 4), group([odd], extras={"t": (1, "\ud800", "\0")}), group([])]
        )
    assert large.rewards_G.tolist() == [1.0] * 12
    assert strange.rewards_G.tolist() == [1.0]
    assert none.rewards_G.shape == (0,)
    assert none.statuses_G == ()


def test_losing_a_worker_costs_the_sample_it_was_judging() -> None:
    """Killed from outside while it judges the second of five samples: the three behind it are judged by its successor."""
    texts = ["reward = 0.5", "import time\ntime.sleep(1000)", *["reward = 0.5"] * 3]
    found: list[Verdicts] = []
    with VerifierPool(VerifyConfig(name="payload", num_workers=1, timeout_s=500), table=TABLE) as pool:
        first = pool._workers[0]
        thread = threading.Thread(target=lambda: found.extend(pool.score([group(texts)])))
        thread.start()
        # One sample answered, the second in hand: worker and judge make a session of two.
        assert eventually(
            lambda: bool(first.flight) and first.flight[0][1] == 1 and len(session_members(first.pid)) == 2
        )
        os.kill(first.pid, signal.SIGKILL)
        thread.join(100)
        assert pool.counts["verify/restarts"] == 1
        assert pool.counts["verify/killed"] == 1
    assert found[0].statuses_G == ("ok", "killed", "ok", "ok", "ok")
    assert found[0].rewards_G.tolist() == [0.5, 0.0, 0.5, 0.5, 0.5]
    assert eventually(lambda: session_members(first.pid) == [])


def test_a_worker_that_died_between_calls_is_replaced() -> None:
    with VerifierPool(VerifyConfig(name="lasting", num_workers=2), table=TABLE) as pool:
        os.kill(pool._workers[0].pid, signal.SIGKILL)
        verdicts = pool.score([group(["reward = 1"] * 20)])
        assert verdicts[0].statuses_G.count("ok") >= 19


def test_a_worker_that_lies_is_not_believed() -> None:
    """A reply that names another request, and one that is no reply at all, end the worker."""
    with VerifierPool(VerifyConfig(name="payload", num_workers=1), table=TABLE) as pool:
        worker = pool._workers[0]
        worker.post(0, Sample("", "", {}, "reward = 1.0"))
        token, _ = worker.flight.popleft()
        worker.flight.append((token[::-1], 0))
        worker.write()
        verdicts = pool.score([group(["reward = 1.0"] * 3)])
        assert pool._workers[0] is not worker
        assert pool.counts["verify/restarts"] == 1
        # The made-up request was the oldest and went by the number of the first sample: that one is charged.
        assert verdicts[0].rewards_G.tolist()[1:] == [1.0, 1.0]


def test_a_prompt_that_does_not_fit_ends_the_run_and_leaves_the_pool_usable() -> None:
    with VerifierPool(VerifyConfig(name="payload", num_workers=2), table=TABLE) as pool:
        with pytest.raises(ValueError, match=r"set data\.train\.kind"):
            pool.score([group(["reward = 1.0"] * 6), group(["reward = 1.0"] * 6, extras={"misuse": True})])
        assert pool.score([group(["reward = 0.5"])])[0].rewards_G.tolist() == [0.5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "payloud"}, r"no verifier 'payloud'.*Did you mean payload\?"),
        ({"name": "payload", "options": {"x": 1}}, r"verify\.options.*no option 'x': it has none"),
        ({"name": "optioned", "options": {"shar": 1}}, r"no option 'shar'.*Did you mean share\?"),
        ({"name": "optioned", "options": {"share": "1"}}, r"verify\.options\.share is '1', expected float"),
        ({"name": "optioned", "options": {"flag": 1}}, r"verify\.options\.flag is 1, expected bool"),
        ({"name": "optioned", "options": {"share": 2}}, r"verify\.options of optioned: share 2"),
        ({"name": "absent"}, r"verify\.name=absent needs the Python package surely_not_here.*pip install it"),
    ],
)
def test_wrong_settings_are_named_before_a_process_starts(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VerifierPool(VerifyConfig(**settings), table=TABLE)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"verifier broken does not start: RuntimeError: its data file is gone"),
        ("late", r"verifier late fails when confined: PermissionError"),
    ],
)
def test_a_verifier_that_cannot_work_is_found_at_the_start(name: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as caught:
        VerifierPool(VerifyConfig(name=name, num_workers=2), table=TABLE)
    assert "\n" not in str(caught.value)


def test_close_ends_everything_at_once_and_twice() -> None:
    pool = VerifierPool(VerifyConfig(name="lasting", num_workers=2), table=TABLE)
    pool.score([group(["reward = 1"] * 4)])
    pids = [worker.pid for worker in pool._workers]
    pool.close()
    pool.close()
    assert all(session_members(pid) == [] for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a zombie is left"
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([group(["reward = 1"])])


TRAINER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from megatron_gcpo.verify.base import Sample
from megatron_gcpo.verify.handle import WorkerHandle
from megatron_gcpo.verify.start import Start
worker = WorkerHandle(Start(module=sys.argv[2], attribute="Payload", options={}, evaluates=sys.argv[3] == "True",
                            timeout_s=1e6, memory_bytes=1 << 28, trainer_pid=os.getpid()))
worker.post(0, Sample("", "", {}, "while True: pass"))
while worker.wants_to_write:
    worker.write()
print(worker.pid, flush=True)
time.sleep(1e6)
"""


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_killed_trainer_leaves_no_process(evaluates: bool) -> None:
    """SIGKILL of the trainer while a judge loops: worker and judge end with it."""
    arguments = [sys.executable, "-c", TRAINER, str(ROOT), TABLE["payload"].module, str(evaluates)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        assert eventually(lambda: len(session_members(worker)) == 2), "the judge never started"
        trainer.kill()
        assert eventually(lambda: not session_members(worker))

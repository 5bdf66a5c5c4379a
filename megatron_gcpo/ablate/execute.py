"""Train what is not finished on this machine, a few runs at a time; one that fails stops nobody but those that need it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from signal import Signals

from megatron_gcpo.ablate.jobs import Failure, Job, is_finished
from megatron_gcpo.ablate.training import LOG, last_words
from megatron_gcpo.cluster.supervise import end_with_parent, noted_signals

POLL_S = 0.2


class Stopped(Exception):
    """We were told to stop; every run has been ended, and goes on from its last checkpoint when it is started again."""

    def __init__(self, signal: Signals) -> None:
        super().__init__(f"stopped by {signal.name}")
        self.signal = signal


def run_here(jobs: Sequence[Job], at_once: int, say: Callable[[str], None]) -> list[Failure]:
    """All unfinished runs, ``at_once`` side by side, those that need none of the others first.

    Every process has ended on return and on an exception; the kernel ends them when we are killed outright.

    Raises:
        Stopped: by Ctrl-C or SIGTERM.
    """
    waiting = [job for job in jobs if not is_finished(job.folder)]
    total, failures = len(waiting), list[Failure]()
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}
    with noted_signals() as received:
        try:
            while (waiting or running) and not received:
                _drop_orphans(waiting, failures)
                _start_more(waiting, running, at_once, say)
                for pid, (job, process) in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[pid]
                    finished = process.returncode == 0 and is_finished(job.folder)
                    if not finished:
                        failures.append(Failure(job=job, reason=describe_end(job, process.returncode)))
                    done = total - len(waiting) - len(running)
                    say(f"[{done}/{total}] {job.name}: {'finished' if finished else failures[-1].reason}")
                time.sleep(POLL_S)
        finally:
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.wait()
    if received:
        raise Stopped(received[0])
    return failures


def describe_end(job: Job, code: int) -> str:
    """How a run that did not finish ended."""
    how = f"exit code {code}" if code >= 0 else f"killed by {Signals(-code).name}"
    return f"{how}: {last_words(job.folder) or 'nothing was said'}"


def _drop_orphans(waiting: list[Job], failures: list[Failure]) -> None:
    """Runs whose warm start has failed cannot begin."""
    lost = {failure.job.folder for failure in failures}
    for job in [job for job in waiting if job.start in lost]:
        waiting.remove(job)
        failures.append(Failure(job=job, reason=f"its warm start {job.start} failed"))


def _start_more(
    waiting: list[Job],
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]],
    at_once: int,
    say: Callable[[str], None],
) -> None:
    pending = {job.folder for job in waiting} | {job.folder for job, _ in running.values()}
    for job in [job for job in waiting if job.start not in pending][: at_once - len(running)]:
        waiting.remove(job)
        job.folder.mkdir(parents=True, exist_ok=True)
        with (job.folder / LOG).open("wb") as log:
            process = subprocess.Popen(
                job.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches us alone, and we pass it on once
                preexec_fn=end_with_parent,
            )
        running[process.pid] = (job, process)
        say(f"{job.name}: started, see {job.folder / LOG}")

"""Hand the runs that are not finished to Slurm through submitit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_gcpo.ablate.execute import POLL_S, Stopped
from megatron_gcpo.ablate.jobs import Job, is_finished
from megatron_gcpo.ablate.training import Training, submitit
from megatron_gcpo.cluster.supervise import noted_signals
from megatron_gcpo.config import load

MARK = "slurm_job"
"""In the folder of a run: the job that trains it."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Where runs are submitted to."""

    name: str
    root: Path
    """The ablation's folder."""
    cluster: str
    """slurm; or local, to try it out on this machine, where ``at_once`` jobs run side by side and all are waited for."""
    at_once: int
    parameters: Mapping[str, Any]
    """Of ``submitit.AutoExecutor.update_parameters``, verbatim (gpus_per_node, timeout_min, slurm_partition,
    slurm_array_parallelism, ...). nodes and tasks_per_node follow from the recipe."""


def submit(queue: Queue, starts: Sequence[Job], cells: Sequence[Job]) -> tuple[list[Job], list[Job]]:
    """Submit all runs that are neither finished nor in the queue already: (the submitted, those in the queue).

    Runs of the same number of machines and processes are one array. The cells wait for the warm starts, whichever way these
    end: one that failed stops only the cells that need it.

    Raises:
        ValueError: submitit is not installed or refuses a parameter, or there is no Slurm.
        Stopped: by Ctrl-C or SIGTERM while jobs were waited for; they have been ended.
    """
    if queue.cluster == "slurm" and submitit().SlurmExecutor.affinity() < 0:
        raise ValueError("--slurm finds no srun: start it where Slurm's commands are, or try it with --cluster local")
    if not {"timeout_min", "slurm_time"} & queue.parameters.keys():
        raise ValueError("--slurm needs timeout_min=MINUTES for one run: submitit's own default is 5 minutes")
    waiting = [job for job in (*starts, *cells) if not is_finished(job.folder)]
    queued = [job for job in waiting if _is_queued(job, queue)]
    first, then = ([job for job in jobs if job in waiting and job not in queued] for jobs in (starts, cells))
    ids = [_queued_id(job) for job in starts if job in queued] + _submit(queue, first)
    if ids and queue.cluster == "slurm":
        dependency = "afterany:" + ":".join(ids)
        queue = replace(queue, parameters={**queue.parameters, "slurm_dependency": dependency})
    _submit(queue, then)
    return [*first, *then], queued


def _submit(queue: Queue, jobs: Sequence[Job]) -> list[str]:
    """The ids of the jobs' submissions."""
    ids: list[str] = []
    for (nodes, tasks), members in itertools.groupby(sorted(jobs, key=_shape), key=_shape):
        executor = submitit().AutoExecutor(folder=str(queue.root / "slurm" / "%j"), cluster=queue.cluster)
        try:
            executor.update_parameters(name=queue.name, **{"nodes": nodes, "tasks_per_node": tasks, **queue.parameters})
        except (AssertionError, NameError, ValueError) as error:
            raise ValueError(f"--slurm: {error}") from None
        ours = list(members)
        for part in itertools.batched(ours, queue.at_once if queue.cluster == "local" else len(ours)):
            with executor.batch():
                found = [executor.submit(Training(command=job.command, folder=job.folder)) for job in part]
            if queue.cluster == "local":
                _wait(found)
                continue
            for job, at in zip(part, found, strict=True):
                job.folder.mkdir(parents=True, exist_ok=True)
                (job.folder / MARK).write_text(str(at.job_id), encoding="utf-8")
                ids.append(str(at.job_id))
    return ids


def _wait(jobs: Sequence[Any]) -> None:
    with noted_signals() as received:
        try:
            while not received and not all(job.done() for job in jobs):
                time.sleep(POLL_S)
        finally:
            for job in jobs:
                if not job.done():
                    job.cancel()
    if received:
        raise Stopped(received[0])


def _shape(job: Job) -> tuple[int, int]:
    """Machines, and tasks on each: a run on one machine starts its own ranks, else srun does."""
    cluster = load(job.recipe, job.overrides).cluster
    return cluster.num_nodes, cluster.processes_per_node if cluster.num_nodes > 1 else 1


def _is_queued(job: Job, queue: Queue) -> bool:
    if queue.cluster == "local" or not (job.folder / MARK).is_file():
        return False
    known = submitit().SlurmJob(queue.root / "slurm" / "%j", _queued_id(job))
    return not known.done(force_check=True)


def _queued_id(job: Job) -> str:
    return (job.folder / MARK).read_text(encoding="utf-8").strip()

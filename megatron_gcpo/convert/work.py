"""Many files written by a few processes into a folder that takes its name only once it is whole.

While it is written the folder is called ``<target>.partial``. A file that is complete gets a record with its length and
sha256, so that a conversion that was killed goes on with the files that lack one. Processes are forked: they share what
the parent knows, take the next file when they have finished one, and are watched from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_gcpo.policy.manifest import NAME as MANIFEST
from megatron_gcpo.policy.manifest import PARTIAL, flush, free_bytes, write_json

PLAN = "conversion.json"
RECORDS = "records"
TICK_S = 0.2
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
BLOCK_BYTES = 256 << 10
"""Hashed and written at once: small enough to be in the core's cache still when it is written."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a conversion runs; none of it changes a tensor."""

    max_shard_bytes: int = 2 << 30
    """Files are about this long; a tensor that is longer has a file of its own."""
    processes: int = 1
    """Files written at once; each holds one layer's largest tensor or so."""
    allow_pickle: bool = False
    overwrite: bool = False
    """Replace a target that exists, once the new one is whole."""
    leave_out: tuple[str, ...] = ()
    """Regular expressions of Hugging Face tensors that are not wanted."""
    progress: bool = False
    """A bar with bytes and time left, on stderr."""

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1 or self.processes < 1:
            raise ValueError("max_shard_bytes and processes must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A file to be written."""

    file: str
    num_bytes: int
    """Of its tensors."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A file that is complete."""

    file: str
    num_bytes: int
    """Its length."""
    sha256: str
    result: Any
    """What its writer returned, JSON-able."""


class Output:
    """What a writer writes to: a file that counts and hashes what passes."""

    def __init__(self, path: Path, count: Callable[[int], None]) -> None:
        self._stream = path.open("wb", buffering=0)
        self._hash = hashlib.sha256()
        self._count = count
        self._position = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            block = view[done : done + BLOCK_BYTES]
            self._hash.update(block)
            written = 0
            while written < len(block):
                written += self._stream.write(block[written:]) or 0
            done += written
        self._position += done
        self._count(done)
        return done

    def tell(self) -> int:
        return self._position

    def flush(self) -> None: ...

    def close(self) -> str:
        """sha256 of what is now safely on the disk."""
        os.fsync(self._stream.fileno())
        self._stream.close()
        return self._hash.hexdigest()


Write = Callable[[int, Output], Any]
"""(number of the job, where to write) -> the record's result."""


def check_target(target: Path, options: Options) -> None:
    """Raises ValueError when the target is something that must not be replaced."""
    if target.exists() and not options.overwrite:
        raise ValueError(
            f"{target} exists: choose another folder, or pass --overwrite to replace it once the new one is whole"
        )
    if target.exists() and not ((target.is_dir() and (target / MANIFEST).is_file()) or not any(target.iterdir())):
        raise ValueError(
            f"{target} was not written by a conversion (it has no {MANIFEST}): it is not replaced, remove it first"
        )
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{target.absolute().parent} is no folder: make it first")


def partial_of(target: Path) -> Path:
    return target.with_name(target.name + PARTIAL)


def carry_out(
    target: Path, jobs: Sequence[Job], write: Write, identity: Mapping[str, Any], options: Options
) -> list[Record]:
    """Every job's record, in order; the files lie in ``partial_of(target)``.

    identity: JSON-able; what a folder left by a killed conversion must have been made from to go on with it.

    Raises ValueError when a file cannot be read or written, naming it; what is complete stays, to go on from.
    """
    partial = partial_of(target)
    _begin(partial, {**identity, "jobs": [[job.file, job.num_bytes] for job in jobs]})
    todo = [n for n, job in enumerate(jobs) if not _is_done(partial, job)]
    missing = sum(jobs[n].num_bytes for n in todo)
    free = free_bytes(partial)
    if missing > free:
        raise ValueError(
            f"{missing / 2**30:,.2f} GiB are to be written and {partial.parent} has {free / 2**30:,.2f} GiB free: free some "
            "or choose another disk"
        )
    total = sum(job.num_bytes for job in jobs)
    with _bar(target.name, total, total - missing, options.progress) as show:
        if options.processes == 1 or len(todo) < 2:
            _write_files(partial, jobs, iter(todo), write, show)
        else:
            _fork(partial, jobs, todo, write, min(options.processes, len(todo)), show)
    return [_record(partial, job) for job in jobs]


def finish(target: Path) -> None:
    """Give the whole folder its name; what had it before goes only now."""
    partial = partial_of(target)
    shutil.rmtree(partial / RECORDS)
    (partial / PLAN).unlink()
    flush(partial)
    replace_folder(partial, target)


def replace_folder(partial: Path, target: Path) -> None:
    """Give a whole folder its name; what had it before goes only now."""
    if target.exists():
        old = target.with_name(target.name + ".replaced")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        partial.rename(target)
        shutil.rmtree(old)
    else:
        partial.rename(target)
    flush(target.absolute().parent)


def lasting_files(partial: Path) -> dict[str, Path]:
    """The files of the folder by name within it, without those that only serve to go on."""
    files = {str(file.relative_to(partial)): file for file in sorted(partial.rglob("*")) if file.is_file()}
    return {n: f for n, f in files.items() if n != PLAN and not n.startswith(f"{RECORDS}/") and not n.endswith(".tmp")}


def copy_file(source: Path, target: Path) -> None:
    """A small file that travels along; read and written, so that a link becomes a file."""
    target.write_bytes(source.read_bytes())


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def saying_disk_full(target: Path) -> Iterator[None]:
    """An error of the file system as one line for the user."""
    try:
        yield
    except OSError as error:
        raise ValueError(_os_reason(error, target)) from None


def _os_reason(error: OSError, target: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk of {target} is full: free some space and run the same command again, it goes on where it stopped"
        )
    return f"{error.filename or target} cannot be used: {error.strerror or error}"


def _begin(partial: Path, identity: Mapping[str, Any]) -> None:
    """The folder of a killed conversion of the same thing, or an empty one."""
    same = False
    if (partial / PLAN).is_file():
        try:
            same = json.loads((partial / PLAN).read_text()) == json.loads(json.dumps(identity))
        except (json.JSONDecodeError, UnicodeDecodeError):
            same = False
    if not same:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / RECORDS).mkdir(parents=True)
        write_json(partial / PLAN, identity)


def _record_path(partial: Path, job: Job) -> Path:
    return partial / RECORDS / f"{job.file}.json"


def _record(partial: Path, job: Job) -> Record:
    return Record(**json.loads(_record_path(partial, job).read_text()))


def _is_done(partial: Path, job: Job) -> bool:
    file = partial / job.file
    return (
        _record_path(partial, job).is_file()
        and file.is_file()
        and file.stat().st_size == _record(partial, job).num_bytes
    )


def _write_files(
    partial: Path, jobs: Sequence[Job], todo: Iterator[int], write: Write, count: Callable[[int], None]
) -> None:
    """While a file is on its way to the disk the next one is written."""
    with saying_disk_full(partial), ThreadPoolExecutor(1) as disk:
        before: Future[None] | None = None
        for n in todo:
            output = Output(partial / (jobs[n].file + ".tmp"), count)
            result = write(n, output)
            if before is not None:
                before.result()
            before = disk.submit(_seal, partial, jobs[n], output, result)
        if before is not None:
            before.result()


def _seal(partial: Path, job: Job, output: Output, result: Any) -> None:
    """Once the file is safe it gets its name, and its record says so."""
    sha256 = output.close()
    (partial / (job.file + ".tmp")).rename(partial / job.file)
    record = {"file": job.file, "num_bytes": output.tell(), "sha256": sha256, "result": result}
    write_json(_record_path(partial, job), record)


def _fork(
    partial: Path, jobs: Sequence[Job], todo: Sequence[int], write: Write, processes: int, show: Callable[[int], None]
) -> None:
    context = multiprocessing.get_context("fork")
    position, written = context.Value("q", 0), context.Value("q", 0)
    errors = context.SimpleQueue()

    def count(num_bytes: int) -> None:
        with written.get_lock():
            written.value += num_bytes

    def taken() -> Iterator[int]:
        while True:
            with position.get_lock():
                mine, position.value = position.value, position.value + 1
            if mine >= len(todo):
                return
            yield todo[mine]

    def work() -> None:
        torch.set_num_threads(1)
        _keep_freed_memory()
        try:
            _write_files(partial, jobs, taken(), write, count)
        except ValueError as error:
            errors.put(str(error))
            os._exit(1)

    workers = [context.Process(target=work) for _ in range(processes)]
    for worker in workers:
        worker.start()
    try:
        _watch(workers, errors, lambda: written.value, show)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
            worker.join()


def _keep_freed_memory() -> None:
    """The C library gives large blocks back at once and takes others, which the kernel fills with zeros first: a tenth of the
    work of a process that only passes tensors on. Other C libraries than glibc are left as they are."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _watch(workers: Sequence[Any], errors: Any, written: Callable[[], int], show: Callable[[int], None]) -> None:
    shown = 0
    running = list(workers)
    while running:
        multiprocessing.connection.wait([w.sentinel for w in running], TICK_S)
        now = written()
        show(now - shown)
        shown = now
        for worker in [w for w in running if w.exitcode is not None]:
            running.remove(worker)
            if worker.exitcode:
                if not errors.empty():
                    raise ValueError(errors.get())
                raise ValueError(
                    f"a process of the conversion ended with exit code {worker.exitcode} (out of memory?): run the same "
                    "command again, it goes on where it stopped; fewer --processes need less memory"
                )


@contextlib.contextmanager
def _bar(name: str, total: int, done: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """show(bytes more): a progress bar, or nothing."""
    if not wanted:
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    begin = time.monotonic()
    console = Console(stderr=True)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=total, completed=done)
        yield lambda num_bytes: progress.advance(task, num_bytes)
        progress.update(task, completed=total)
    console.print(f"{total / 1e9:.2f} GB in {time.monotonic() - begin:.1f} s")

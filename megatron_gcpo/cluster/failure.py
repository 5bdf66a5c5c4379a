"""How a process says why it failed: one record per rank in the log folder, one line for the user."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

LINE_LIMIT = 600


class PeerLost(RuntimeError):
    """Other ranks died or did not come; this rank itself did nothing wrong."""


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    rank: int
    message: str
    """One line."""
    is_consequence: bool
    """True when the rank only failed because another one did."""
    at_s: float
    """Unix time."""


def log_path(log_dir: Path, rank: int) -> Path:
    """What a rank wrote (rank 0 writes to the console: only its traceback is here)."""
    return log_dir / f"rank{rank}.log"


def describe(error: BaseException) -> str:
    """An exception on one line: ours as they are, foreign ones with their class name."""
    text = " ".join(str(error).split())
    if not isinstance(error, ValueError | PeerLost) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= LINE_LIMIT else text[:LINE_LIMIT] + " ..."


def write(log_dir: Path, rank: int, message: str, error: BaseException | None = None) -> None:
    """Leave the record, and the traceback in the rank's log. The first record of a rank stays."""
    log_dir.mkdir(parents=True, exist_ok=True)
    if error is not None:
        with log_path(log_dir, rank).open("a") as log:
            log.write("".join(traceback.format_exception(error)))
    consequence = error is None or isinstance(error, PeerLost)
    record = FailureRecord(rank=rank, message=message, is_consequence=consequence, at_s=time.time())
    path = _record_path(log_dir, rank)
    if path.exists():
        return
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(asdict(record)))
    unfinished.rename(path)


def clear(log_dir: Path, num_ranks: int) -> None:
    """Forget the records of an earlier run in this folder."""
    for rank in range(num_ranks):
        _record_path(log_dir, rank).unlink(missing_ok=True)


def first_failure(log_dir: Path, exit_codes: Mapping[int, int]) -> tuple[int, str]:
    """The rank that failed first, and why.

    ``exit_codes``: the non-zero ones, of ranks that ended by themselves, in the order seen; negative: killed by that
    signal. A rank that failed on its own account comes before one that was killed, and that before those that merely
    lost a peer.
    """
    records = {rank: record for rank in exit_codes if (record := _read(log_dir, rank)) is not None}
    own = sorted((r.at_s, r.rank) for r in records.values() if not r.is_consequence)
    silent = [rank for rank in exit_codes if rank not in records]
    if own:
        rank = own[0][1]
    elif silent:
        rank = min(silent, key=lambda r: exit_codes[r] > 0)
    else:
        rank = min(records.values(), key=lambda r: r.at_s).rank
    return rank, records[rank].message if rank in records else _describe_exit(exit_codes[rank])


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    import signal

    name = signal.Signals(-code).name
    hint = " (the kernel does this when memory runs out: see dmesg)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _record_path(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank{rank}.error.json"


def _read(log_dir: Path, rank: int) -> FailureRecord | None:
    path = _record_path(log_dir, rank)
    return FailureRecord(**json.loads(path.read_text())) if path.exists() else None

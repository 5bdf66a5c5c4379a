"""What the report of a very long run costs: a made-up run of N rollouts, tools/report.py on it, its seconds and bytes.

    OMP_NUM_THREADS=1 python tools/bench_report.py [--rollouts 1000000] [--tokens 100] [--folder /tmp/bench_report]

A step has 64 prompts x 8 rollouts of ``tokens`` tokens each. The run is written in today's format, and removed at the end.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from megatron_gcpo.observe.rollouts import SCHEMA
from megatron_gcpo.observe.timers import PHASES

PROMPTS, GROUP = 64, 8
WORDS = ("split", "round", "count", "carry", "move", "add", "ones", "tens", "then", "so", "is", "and")
METRICS = (
    *("reward/mean", "train/entropy", "train/grad_norm", "train/rollout_logprob_gap", "rollout/length_mean"),
    *("credit/team_value", "embed/cosine_mean", "perf/tokens_per_s", "perf/memory_peak_gb"),
    *(f"time/{phase}_s" for phase in PHASES),
    *(f"credit/number_{i}" for i in range(40)),
)


def write_run(folder: Path, num_steps: int, num_tokens: int) -> None:
    """A run folder of ``num_steps`` steps whose numbers are random and whose texts are a few words."""
    rng = np.random.default_rng(0)
    (folder / "rollouts").mkdir(parents=True)
    config = {"run": {"name": "long", "steps": num_steps}, "method": {"name": "gcpo"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    rows = PROMPTS * GROUP
    offsets = np.arange(0, rows * num_tokens + 1, num_tokens)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as metrics:
        for step in range(1, num_steps + 1):
            values = dict(zip(METRICS, rng.random(len(METRICS)).tolist(), strict=True))
            metrics.write(json.dumps({"step": step, "time": float(step), **values}) + "\n")
            columns = _columns(rng, step, rows)
            tokens = rows * num_tokens
            columns["token_ids"] = _ragged(offsets, rng.integers(0, 150_000, tokens, dtype=np.int32))
            columns["versions"] = _ragged(offsets, np.full(tokens, step, np.int32))
            columns["logprobs"] = _ragged(offsets, -rng.random(tokens, dtype=np.float32))
            columns["entropies"] = _ragged(offsets, rng.random(tokens, dtype=np.float32))
            table = pa.table([columns.get(f.name, pa.nulls(rows, f.type)) for f in SCHEMA], schema=SCHEMA)
            pq.write_table(table, folder / "rollouts" / f"step_{step:06d}_replica_000.parquet", compression="zstd")


def _ragged(offsets: np.ndarray, values: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def _columns(rng: np.random.Generator, step: int, rows: int) -> dict[str, pa.Array]:
    texts = [" ".join(words) for words in rng.choice(WORDS, (rows, 30)).tolist()]
    ids = [f"problem-{step}-{i // GROUP}" for i in range(rows)]
    return {
        "step": pa.array(np.full(rows, step, np.int32)),
        "prompt_id": pa.array(ids),
        "sample": pa.array(np.tile(np.arange(GROUP, dtype=np.int32), rows // GROUP)),
        "prompt": pa.array(ids),
        "answer": pa.array(["42"] * rows),
        "text": pa.array(texts),
        "finish_reason": pa.array(["stop"] * rows),
        "verdict": pa.array(["ok"] * rows),
        "reward": pa.array(rng.integers(0, 2, rows).astype(np.float32)),
        "credit": pa.array(rng.random(rows)),
        "advantage": pa.array(rng.standard_normal(rows)),
        "trained": pa.array([True] * rows),
        "policy_version": pa.array(np.full(rows, step, np.int32)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench_report"))
    arguments = parser.parse_args()
    if arguments.folder.exists():
        sys.exit(f"error: {arguments.folder} is there already: name another --folder")
    num_steps = -(-arguments.rollouts // (PROMPTS * GROUP))
    try:
        write_run(arguments.folder, num_steps, arguments.tokens)
        size = sum(path.stat().st_size for path in arguments.folder.rglob("*") if path.is_file())
        begun, cpu = time.perf_counter(), _cpu_seconds()
        subprocess.run([sys.executable, "tools/report.py", str(arguments.folder)], check=True)
        seconds, cpu = time.perf_counter() - begun, _cpu_seconds() - cpu
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        page = (arguments.folder / "report.html").stat().st_size
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    print(
        f"{num_steps * PROMPTS * GROUP:,} rollouts of {arguments.tokens} tokens in {num_steps} steps ({size / 1e9:.2f} GB): "
        f"{seconds:.1f} s ({cpu:.1f} CPU-s), peak memory {peak / 1e9:.2f} GB, page {page / 1e6:.1f} MB"
    )


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()

"""Every rollout of every step in Parquet, one file per step and replica: what happened can be looked at and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_gcpo.embed.encoder import content_hash
from megatron_gcpo.types import Credit, Group, Verdicts

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("prompt_id", pa.string()),
        ("sample", pa.int32()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("text", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("verdict", pa.string()),
        ("reward", pa.float32()),
        ("credit", pa.float64()),
        ("advantage", pa.float64()),
        ("trained", pa.bool_()),
        ("embedding_hash", pa.string()),
        ("policy_version", pa.int32()),
        ("versions", pa.list_(pa.int32())),
        ("token_advantages", pa.list_(pa.float32())),
        ("entropies", pa.list_(pa.float32())),
    ]
)


def write_rollouts(
    folder: Path,
    step: int,
    replica: int,
    groups: Sequence[Group],
    verdicts: Sequence[Verdicts],
    credits: Sequence[Credit],
    trained: Sequence[bool],
    span_texts: Sequence[Sequence[str | None]],
    entropies: Sequence[Sequence[np.ndarray] | None],
) -> Path:
    """Write one step's rollouts of one replica; the file appears whole or not at all.

    Args:
        trained: per group, whether it entered the update (a filtered group did not).
        span_texts: per group and rollout, the text that was embedded, None where nothing was; its content hash is the
            key under which the encoder cached the embedding.
        entropies: per group and rollout [T] nats of the trainer's distribution at each token before the update, None for
            a group that the trainer has not seen. ``token_advantages`` are null where each token has the rollout's.
    """
    rows = [
        {
            "step": step,
            "prompt_id": _storable(group.prompt.id),
            "sample": i,
            "prompt": _storable(group.prompt.text),
            "answer": _storable(group.prompt.answer),
            "text": _storable(rollout.text),
            "token_ids": rollout.token_ids,
            "logprobs": rollout.logprobs,
            "finish_reason": rollout.finish_reason,
            "verdict": verdict.statuses_G[i],
            "reward": float(verdict.rewards_G[i]),
            "credit": float(credit.credits_G[i]),
            "advantage": float(credit.advantages_G[i]),
            "trained": kept,
            "embedding_hash": None if (embedded := texts[i]) is None else content_hash(embedded),
            "policy_version": rollout.policy_version,
            "versions": rollout.versions_T,
            "token_advantages": None if (own := credit.token_advantages_G) is None else own[i].numpy(),
            "entropies": None if known is None else known[i],
        }
        for group, verdict, credit, kept, texts, known in zip(
            groups, verdicts, credits, trained, span_texts, entropies, strict=True
        )
        for i, rollout in enumerate(group.rollouts)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}_replica_{replica:03d}.parquet"
    unfinished = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), unfinished, compression="zstd")
    unfinished.replace(path)
    return path


def _storable(text: str) -> str:
    """Halves of torn characters, which UTF-8 has no bytes for, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def drop_rollouts_after(folder: Path, resume_step: int) -> None:
    """Remove the files of steps that will run again, maybe with other replicas, so that each is there once."""
    for path in folder.glob("step_*_replica_*.*"):
        if int(path.name.split("_")[1]) > resume_step:
            path.unlink(missing_ok=True)

"""Everything the page shows, as JSON-able values. Model text is data in it, never markup."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_gcpo.embed.span import Span, embedded_span
from megatron_gcpo.evaluate.intervals import finite
from megatron_gcpo.observe.history import GROUPED, History, group_bounds, read_history, read_rollouts
from megatron_gcpo.observe.replay import Embeds
from megatron_gcpo.observe.timers import PHASES

MAX_TEXT = 6000
"""Characters of a rollout that the page holds."""
SAME_MEANING = 0.95
"""Least cosine of two different texts that are called near-duplicates."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """How much of a run the page holds; runs have millions of rollouts."""

    steps: int = 12
    """Spread evenly, the first and the last among them."""
    prompts: int = 8
    """Groups of each of these steps."""


def run_payload(history: History, sampled: Sampled, encoder: Embeds | None, span: Span) -> dict[str, Any]:
    """One run. Without an encoder there are no similarities."""
    groups, seen, skipped = _groups(history, sampled)
    if encoder is not None and groups:
        _add_similarities(groups, encoder, span)
    tokens = _token_texts(history, groups)
    return {
        "name": history.name,
        "folder": str(history.folder),
        "label": re.sub(r"[_-]?seed[_-]?\d+$", "", history.name) or history.name,
        "step": history.step,
        "steps": history.steps,
        "finished": history.finished,
        "method": history.method,
        "skipped": [*history.skipped, *skipped],
        "series": _series(history),
        "phases": [*PHASES, "other"],
        "before": dict(history.summary.before or {}) if history.summary else {},
        "after": dict(history.summary.after or {}) if history.summary else {},
        "groups": groups,
        "sampled": seen,
        "tokens": tokens,
        "replay": _replay(history.folder / "replay" / "credit.json"),
    }


def _series(history: History) -> dict[str, tuple[list[int], list[float]]]:
    """All metrics; evaluations begin with that of the policy the run started from."""
    series = {name: history.series(name) for name in history.metric_names()}
    for name, value in (history.summary.before or {}).items() if history.summary else ():
        steps, values = series.get(f"eval/{name}", ([], []))
        series[f"eval/{name}"] = ([0, *steps], [float(value), *values])
    return series


def payload(folders: Sequence[Path], sampled: Sampled, encoder: Embeds | None, span: Span) -> dict[str, Any]:
    """All runs of a page. Raises ValueError when one of them is no run."""
    return {"runs": [run_payload(read_history(folder), sampled, encoder, span) for folder in folders]}


def _groups(history: History, sampled: Sampled) -> tuple[list[dict[str, Any]], str, tuple[str, ...]]:
    steps = sorted({file.step for file in history.rollout_files})
    if not steps:
        return [], "no rollouts were saved", ()
    places = _spread(len(steps), sampled.steps)
    chosen = {steps[i] for i in places}
    files = [file for file in history.rollout_files if file.step in chosen]
    replicas = max(file.replica for file in files) + 1
    totals: list[int] = []

    def keep(table: pa.Table) -> pa.Table:
        bounds = group_bounds(table)
        totals.append(len(bounds))
        rows = [row for i in _spread(len(bounds), -(-sampled.prompts // replicas)) for row in range(*bounds[i])]
        return table.take(pa.array(rows, pa.int64()))

    table, skipped = read_rollouts(files, keep=keep, needed=(*GROUPED, "text", "reward"))
    by_step: dict[int, list[tuple[int, int]]] = {}
    for begin, end in group_bounds(table):
        by_step.setdefault(table["step"][begin].as_py(), []).append((begin, end))
    groups = [
        _group(table.slice(begin, end - begin).to_pylist())
        for bounds in by_step.values()
        for begin, end in (bounds[i] for i in _spread(len(bounds), sampled.prompts))
    ]
    said = f"{len(groups)} of the {sum(totals)} groups of {len(by_step)} of {len(steps)} saved steps"
    return groups, said, skipped


def _spread(total: int, wanted: int) -> list[int]:
    """Up to ``wanted`` indices below ``total``, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, total - 1, min(wanted, total)).round().astype(int)).tolist()


def _group(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = rows[0]
    return {
        "step": first["step"],
        "prompt_id": first["prompt_id"],
        "prompt": first["prompt"],
        "answer": first["answer"],
        "rollouts": [
            {
                "text": row["text"][:MAX_TEXT],
                "cut": len(row["text"]) > MAX_TEXT,
                "reward": row["reward"],
                "credit": row["credit"],
                "advantage": row["advantage"],
                "verdict": row["verdict"],
                "finish": row["finish_reason"],
                "trained": row["trained"],
                "version": row["policy_version"],
                "length": len(row["token_ids"] or ()),
                "ids": [int(i) for i in row["token_ids"] or ()],
                "logprobs": [_short(x) for x in row["logprobs"] or ()],
                "entropies": _shorts(row["entropies"]),
                "token_advantages": _shorts(row["token_advantages"]),
                "versions": None if len(set(versions := row["versions"] or ())) < 2 else list(versions),
            }
            for row in rows
        ],
    }


def _shorts(values: Sequence[float | None] | None) -> list[float | None] | None:
    return None if values is None else [_short(value) for value in values]


def _short(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(float(value), 4)


def _add_similarities(groups: Sequence[dict[str, Any]], encoder: Embeds, span: Span) -> None:
    """Cosines of all pairs, two principal axes, and pairs that are near-duplicates."""
    texts = [[embedded_span(r["text"], span) for r in group["rollouts"]] for group in groups]
    distinct = list(dict.fromkeys(text for own in texts for text in own))
    rows = dict(zip(distinct, encoder.encode(distinct).double().numpy(), strict=True))
    for group, own in zip(groups, texts, strict=True):
        unit_GD = np.stack([rows[text] for text in own])
        cosine_GG = unit_GD @ unit_GD.T
        centred = unit_GD - unit_GD.mean(0)
        left, values, _ = np.linalg.svd(centred, full_matrices=False)
        axes = (left * values)[:, :2]
        group["cosine"] = np.round(cosine_GG, 4).tolist()
        group["axes"] = np.round(axes if axes.shape[1] == 2 else np.zeros((len(own), 2)), 5).tolist()
        same_GG = np.array([[a == b for b in own] for a in own])
        group["same_text"] = _clusters(same_GG)
        # one of each text: what is left is alike in meaning only
        first_G = np.array([own.index(text) == i for i, text in enumerate(own)])
        group["same_meaning"] = _clusters((cosine_GG >= SAME_MEANING) & first_G[:, None] & first_G[None])


def _clusters(alike_GG: np.ndarray) -> list[list[int]]:
    """Connected components of two or more, each sorted."""
    components: dict[int, list[int]] = {}
    root_G = list(range(len(alike_GG)))
    for i, j in zip(*np.nonzero(alike_GG), strict=True):
        old, new = root_G[j], root_G[i]
        root_G = [new if root == old else root for root in root_G]
    for member, root in enumerate(root_G):
        components.setdefault(root, []).append(member)
    return sorted(members for members in components.values() if len(members) > 1)


def _token_texts(history: History, groups: Sequence[dict[str, Any]]) -> dict[str, str] | None:
    """Token id -> its text, of all tokens on the page; None when the run's tokenizer is not at hand."""
    from megatron_gcpo.config.records import Config
    from megatron_gcpo.data import load_tokenizer

    used = sorted({i for group in groups for rollout in group["rollouts"] for i in rollout["ids"]})
    try:
        config = Config.model_validate(history.config)
        tokenizer = load_tokenizer(config.model, config.data.train)
    except ValueError:  # a run of another version, or a folder that has moved
        return None
    return {str(i): tokenizer.convert_tokens_to_string(list(tokenizer.convert_ids_to_tokens([i]))) for i in used}


def _replay(path: Path) -> list[dict[str, Any]] | None:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return finite(rows) if isinstance(rows, list) else None

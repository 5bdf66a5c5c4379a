"""Offline credit replay: what other methods would have paid the rollouts that a run has saved. No model is needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from pydantic import ValidationError

from megatron_gcpo.config.records import EmbedConfig
from megatron_gcpo.embed.span import Span, embedded_span
from megatron_gcpo.methods import EMBEDDING_NEEDS, Method, MethodOptions, has_signal, resolve
from megatron_gcpo.observe.history import History, group_bounds
from megatron_gcpo.types import CreditInputs

COLUMNS = ("step", "prompt_id", "sample", "prompt", "text", "token_ids", "logprobs", "reward", "advantage")
CORRECT = 0.99
AS_TRAINED = "as trained"


class Embeds(Protocol):
    """What turns texts into unit rows; embed.Encoder is one."""

    def encode(self, texts: Sequence[str]) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class SavedGroup:
    """One group as the run saved it."""

    step: int
    prompt_id: str
    prompt: str
    texts: tuple[str, ...]
    rewards_G: np.ndarray
    """[G] float64."""
    lengths_G: np.ndarray
    """[G] int64."""
    logprobs_G: np.ndarray
    """[G] float64, summed over tokens."""
    advantages_G: np.ndarray
    """[G] float64 that the run trained with."""
    embeddings_GD: torch.Tensor | None = None
    """[G, D] float32 unit rows of all rollouts, once ``embed`` has run."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way of paying."""

    label: str
    method: Method
    options: MethodOptions

    @property
    def compares(self) -> bool:
        return bool(self.method.needs_for(self.options) & EMBEDDING_NEEDS)


def make_variants(
    methods: Sequence[str], values: Sequence[str], scales: Sequence[float], sections: Mapping[str, Mapping[str, Any]]
) -> list[Variant]:
    """One variant for each method, and for each (value, c) of methods that have both options.

    sections: method name -> its configuration section without ``name`` (configs/method/NAME.yaml); missing: defaults.

    Raises:
        ValueError: an unknown method, or an option it refuses.
    """
    found = []
    for name in methods:
        section = dict(sections.get(name, {}))
        method, _ = resolve({"name": name, **section})
        grid: list[dict[str, Any]] = [{}]
        if {"value", "c"} <= method.options.model_fields.keys():
            grid = [dict(zip(("value", "c"), pair, strict=True)) for pair in itertools.product(values, scales)]
        for choice in grid:
            label = " ".join([name, *(f"{key}={value}" for key, value in choice.items())])
            found.append(Variant(label=label, method=method, options=resolve({"name": name, **section, **choice})[1]))
    return found


def embed_config(history: History, **given: str | None) -> tuple[EmbedConfig, list[str]]:
    """How a run embedded, but for what is given; and a line for what of it this version does not know."""
    own = history.config.get("embed")
    section = {key: value for key, value in own.items() if key != "cache_entries"} if isinstance(own, dict) else {}
    chosen = {key: value for key, value in given.items() if value is not None}
    skipped = []
    try:
        EmbedConfig.model_validate(section)
    except ValidationError as error:
        fields = sorted({str(problem["loc"][0]) for problem in error.errors()})
        section = {key: value for key, value in section.items() if key not in fields}
        skipped = [f"config.yaml: embed.{', embed.'.join(fields)} of another version, defaults in their place"]
    return EmbedConfig.model_validate({**section, **chosen, "cache_entries": 0}), skipped


def saved_groups(rollouts: pa.Table) -> list[SavedGroup]:
    """The groups of a table with ``COLUMNS``, in its order. A group begins where ``sample`` is 0."""
    column = {name: rollouts[name].to_pylist() for name in ("step", "prompt_id", "prompt", "text")}
    rewards, advantages = (rollouts[name].to_numpy().astype(np.float64) for name in ("reward", "advantage"))
    lengths = _list_lengths(rollouts["token_ids"])
    sums = _list_sums(rollouts["logprobs"])
    groups = []
    for begin, end in group_bounds(rollouts):
        part = slice(begin, end)
        groups.append(
            SavedGroup(
                step=column["step"][begin],
                prompt_id=column["prompt_id"][begin],
                prompt=column["prompt"][begin],
                texts=tuple(column["text"][part]),
                rewards_G=rewards[part],
                lengths_G=lengths[part],
                logprobs_G=sums[part],
                advantages_G=advantages[part],
            )
        )
    return groups


def embed(groups: Sequence[SavedGroup], encoder: Embeds, span: Span) -> list[SavedGroup]:
    """The groups with the embeddings of all their rollouts; each distinct text is encoded once."""
    texts = [[embedded_span(text, span) for text in group.texts] for group in groups]
    distinct = list(dict.fromkeys(itertools.chain.from_iterable(texts)))
    place = {text: i for i, text in enumerate(distinct)}
    rows_ND = encoder.encode(distinct)
    return [
        replace(group, embeddings_GD=rows_ND[[place[text] for text in own]])
        for group, own in zip(groups, texts, strict=True)
    ]


def pay(group: SavedGroup, variant: Variant) -> torch.Tensor:
    """[G] float64 advantages under a variant. Methods that replace rollouts (``transform``) pay what was sampled."""
    rewards_G, lengths_G = torch.from_numpy(group.rewards_G), torch.from_numpy(group.lengths_G)
    shaped_G = variant.method.shape_rewards(rewards_G, lengths_G, variant.options)
    inputs = CreditInputs(
        rewards_G=shaped_G,
        embeddings_GD=_seen(group, variant, shaped_G),
        lengths_G=lengths_G,
        logprobs_G=torch.from_numpy(group.logprobs_G),
        texts_G=group.texts,
    )
    return variant.method.credit(inputs, variant.options).advantages_G


def _seen(group: SavedGroup, variant: Variant, shaped_G: torch.Tensor) -> torch.Tensor | None:
    """The embeddings that the cost rule of a run would have computed for this method."""
    needs = variant.method.needs_for(variant.options)
    if not needs & EMBEDDING_NEEDS:
        return None
    assert group.embeddings_GD is not None, "got a group without embeddings, expected embed() before"
    if "all_embeddings" in needs:
        return group.embeddings_GD
    rewarded_G = shaped_G != 0
    return group.embeddings_GD * rewarded_G[:, None] if rewarded_G.sum() >= 2 else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One variant beside what the run was trained with."""

    label: str
    groups_with_signal: float
    """Share of groups whose advantages are not all zero."""
    pairs_reordered: float
    """Share of pairs of a group that the two order differently (ties count as an order of their own)."""
    signs_changed: float
    """Share of rollouts that are pushed the other way, or now or no longer pushed at all."""
    mean_advantage: Mapping[str, float]
    """By kind of rollout: wrong; correct; with embeddings: correct_redundant, correct_different (whether the nearest other
    correct rollout of the group is nearer than the median over all); shortest and longest third of its group."""


def compare(groups: Sequence[SavedGroup], label: str, advantages: Sequence[np.ndarray]) -> Comparison:
    """What a variant's advantages (one array [G] per group) change."""
    pairs = reordered = changed = rollouts = signal = 0
    kinds: dict[str, list[float]] = {}
    threshold = _median_nearest(groups)
    for group, ours_G in zip(groups, advantages, strict=True):
        theirs_G = group.advantages_G
        upper = np.triu_indices(len(ours_G), 1)
        order = [np.sign(np.round(a[:, None] - a[None], 9))[upper] for a in (ours_G, theirs_G)]
        pairs += len(upper[0])
        reordered += int((order[0] != order[1]).sum())
        rollouts += len(ours_G)
        changed += int((np.sign(np.round(ours_G, 9)) != np.sign(np.round(theirs_G, 9))).sum())
        signal += has_signal(torch.from_numpy(ours_G))
        for kind, mask_G in _kinds(group, threshold).items():
            kinds.setdefault(kind, []).extend(ours_G[mask_G].tolist())
    return Comparison(
        label=label,
        groups_with_signal=signal / max(len(groups), 1),
        pairs_reordered=reordered / max(pairs, 1),
        signs_changed=changed / max(rollouts, 1),
        mean_advantage={kind: float(np.mean(values)) for kind, values in kinds.items() if values},
    )


@dataclass(frozen=True, kw_only=True)
class Mover:
    """A rollout that a variant ranks very differently within its group."""

    step: int
    prompt_id: str
    sample: int
    rank_before: int
    """0 is the best paid."""
    rank_after: int
    reward: float
    text: str


def movers(groups: Sequence[SavedGroup], advantages: Sequence[np.ndarray], count: int = 5) -> list[Mover]:
    """The rollouts that gain most ranks, at most one of each group."""
    found = []
    for group, ours_G in zip(groups, advantages, strict=True):
        before_G, after_G = _ranks(group.advantages_G), _ranks(ours_G)
        best = int(np.argmax(before_G - after_G))
        if before_G[best] > after_G[best]:
            found.append(
                Mover(
                    step=group.step,
                    prompt_id=group.prompt_id,
                    sample=best,
                    rank_before=int(before_G[best]),
                    rank_after=int(after_G[best]),
                    reward=float(group.rewards_G[best]),
                    text=group.texts[best],
                )
            )
    return sorted(found, key=lambda m: (m.rank_after - m.rank_before, m.step, m.prompt_id))[:count]


def _ranks(values_G: np.ndarray) -> np.ndarray:
    """[G] how many are paid more."""
    return (np.round(values_G[None], 9) > np.round(values_G[:, None], 9)).sum(1)


def _kinds(group: SavedGroup, threshold: float | None) -> dict[str, np.ndarray]:
    correct_G = group.rewards_G >= CORRECT
    order = np.argsort(np.argsort(group.lengths_G, kind="stable"), kind="stable")
    third = max(1, len(order) // 3)
    kinds = {"wrong": ~correct_G, "correct": correct_G}
    if threshold is not None and (nearest_G := _nearest(group)) is not None:
        kinds["correct_redundant"] = correct_G & (nearest_G > threshold)
        kinds["correct_different"] = correct_G & (nearest_G <= threshold)
    return {**kinds, "shortest": order < third, "longest": order >= len(order) - third}


def _nearest(group: SavedGroup) -> np.ndarray | None:
    """[G] largest cosine to another correct rollout; None without embeddings or with fewer than two correct."""
    correct_G = group.rewards_G >= CORRECT
    if group.embeddings_GD is None or correct_G.sum() < 2:
        return None
    cosine_GG = (group.embeddings_GD @ group.embeddings_GD.T).double().numpy().copy()
    np.fill_diagonal(cosine_GG, -1.0)
    cosine_GG[:, ~correct_G] = -1.0
    return cosine_GG.max(1)


def _median_nearest(groups: Iterable[SavedGroup]) -> float | None:
    values = [
        value
        for group in groups
        if (nearest_G := _nearest(group)) is not None
        for value in nearest_G[group.rewards_G >= CORRECT].tolist()
    ]
    return float(np.median(values)) if values else None


def _list_lengths(column: pa.ChunkedArray) -> np.ndarray:
    return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks] or [np.zeros(0, np.int64)])


def _list_sums(column: pa.ChunkedArray) -> np.ndarray:
    parts = []
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        values = chunk.values.to_numpy(zero_copy_only=False).astype(np.float64)
        total = np.concatenate([[0.0], np.cumsum(values)])
        parts.append(total[offsets[1:]] - total[offsets[:-1]])
    return np.concatenate(parts or [np.zeros(0)])

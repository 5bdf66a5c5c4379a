"""load_prompts: from a source's configuration to a PromptSet, with every bad row accounted for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import batched
from typing import TYPE_CHECKING

from megatron_gcpo.data.generated import read_reasoning_gym, read_task
from megatron_gcpo.data.readers import read_hf, read_jsonl, read_parquet
from megatron_gcpo.data.records import BadRow, Item, PromptSet
from megatron_gcpo.data.template import check_template, encode_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_gcpo.config.records import DataConfig, SourceConfig
    from megatron_gcpo.types import Prompt

SOURCES: dict[str, Callable[[SourceConfig], Iterator[Item | BadRow]]] = {
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "hf": read_hf,
    "reasoning_gym": read_reasoning_gym,
    "task": read_task,
}
"""How each ``kind`` of source is read."""

_ROWS_AT_ONCE = 512
_LISTED = 5
_KEPT = 100


def load_prompts(source: SourceConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """All prompts of a source, templated and tokenized, in the order of the source (up to ``source.limit``).

    A row is bad when it cannot be read, misses a column, holds the wrong type or nothing, repeats an id, or has more
    than ``data.max_prompt_tokens`` tokens. ``data.on_bad_row`` says whether bad rows end the run or are counted.

    Raises:
        ValueError: no such file or data set; a package is missing; a template that the tokenizer lacks; bad rows under
            "refuse" (count, and the first few with file and line); no usable row at all.
    """
    section = "data.heldout" if source is data.heldout else "data.train"
    try:
        check_template(data, tokenizer)
        return _load(source, data, tokenizer)
    except ValueError as error:
        raise ValueError(f"{section}: {error}") from error


def _load(source: SourceConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    from megatron_gcpo.types import Prompt

    prompts: list[Prompt] = []
    demonstrations: list[tuple[str, ...]] = []
    weights: list[tuple[float, ...]] = []
    skipped: Counter[str] = Counter()
    bad_rows: list[BadRow] = []
    for row in _judge(SOURCES[source.kind](source), data, tokenizer):
        if isinstance(row, BadRow):
            skipped[row.kind] += 1
            bad_rows += [row] if len(bad_rows) < _KEPT else []
            continue
        item, token_ids = row
        text = item.prompt if isinstance(item.prompt, str) else item.prompt[-1]["content"]
        prompts.append(Prompt(id=item.id, token_ids=token_ids, text=text, answer=item.answer, extras=item.extras))
        demonstrations.append(item.demonstrations)
        weights.append(item.weights)
        if len(prompts) == source.limit:
            break
    origin = f"{source.kind} {source.path or source.name}"
    if bad_rows and data.on_bad_row == "refuse":
        raise ValueError(f"{_report(skipped, bad_rows, origin)}\nRepair them, or set data.on_bad_row: skip.")
    if not prompts:
        why = _report(skipped, bad_rows, origin) if bad_rows else f"{origin} is empty"
        raise ValueError(f"no usable prompt: {why}")
    return PromptSet(
        origin=origin,
        prompts=tuple(prompts),
        demonstrations_P=tuple(demonstrations),
        demonstration_weights_P=tuple(weights),
        skipped=dict(skipped),
        bad_rows=tuple(bad_rows),
    )


def _judge(
    rows: Iterator[Item | BadRow], data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Item, tuple[int, ...]] | BadRow]:
    """Every row, in order: with its tokens when it is sound, else what is wrong with it."""
    seen: dict[str, str] = {}
    for chunk in batched(rows, _ROWS_AT_ONCE):
        prompts = [row.prompt for row in chunk if isinstance(row, Item)]
        encoded = iter(encode_prompts(prompts, data, tokenizer))
        for row in chunk:
            if isinstance(row, BadRow):
                yield row
                continue
            token_ids = next(encoded)
            if isinstance(token_ids, str):
                yield BadRow(where=row.where, kind="template", reason=token_ids)
            elif problem := _problem(row, len(token_ids), seen, data.max_prompt_tokens):
                yield problem
            else:
                seen[row.id] = row.where
                yield row, token_ids


def _problem(item: Item, num_tokens: int, seen: dict[str, str], longest: int) -> BadRow | None:
    """What is wrong with an item that its columns do not show."""
    if not num_tokens:
        return BadRow(where=item.where, kind="empty", reason="the prompt has no tokens")
    if num_tokens > longest:
        reason = f"the prompt has {num_tokens} tokens, more than data.max_prompt_tokens {longest}"
        return BadRow(where=item.where, kind="too long", reason=reason)
    if item.id in seen:
        reason = f"the id {item.id!r} was used before, at {seen[item.id]}"
        return BadRow(where=item.where, kind="duplicate id", reason=reason)
    return None


def _report(skipped: Counter[str], bad_rows: list[BadRow], origin: str) -> str:
    total = skipped.total()
    kinds = ", ".join(f"{count} {kind}" for kind, count in skipped.most_common())
    lines = [f"{total} bad row{'s' * (total > 1)} in {origin} ({kinds})"]
    lines += [f"  {row.where}: {row.reason}" for row in bad_rows[:_LISTED]]
    if total > _LISTED:
        lines.append(f"  ... and {total - _LISTED} more")
    return "\n".join(lines)

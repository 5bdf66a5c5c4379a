"""Items that are generated rather than read: packaged tasks and reasoning_gym data sets."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_gcpo.config.problems import or_nearest
from megatron_gcpo.data.records import Item
from megatron_gcpo.data.tasks import make_task
from megatron_gcpo.seeds import derive_seed

if TYPE_CHECKING:
    from megatron_gcpo.config.records import SourceConfig


def read_task(source: SourceConfig) -> Iterator[Item]:
    """The problems of one split of a packaged task; extras are ``task`` (its name) and ``problem`` (its numbers)."""
    task = make_task(source.name, source.options)
    for problem in task.split(source.split):
        problem_id = task.problem_id(problem)
        demonstrations = task.demonstrations(problem)
        yield Item(
            where=f"problem {problem_id}",
            id=problem_id,
            prompt=task.prompt_text(problem),
            answer=task.answer(problem),
            extras={"task": task.name, "problem": problem},
            demonstrations=tuple(d.text for d in demonstrations),
            weights=tuple(d.weight for d in demonstrations),
        )


def read_reasoning_gym(source: SourceConfig) -> Iterator[Item]:
    """A procedural data set of reasoning_gym; extras hold what its own scorer needs: the whole ``entry``, the name of
    the ``dataset`` and the ``dataset_options``.

    ``options`` go to ``reasoning_gym.create_dataset`` (size, seed, difficulty). Without a seed there, each ``split``
    draws its own problems; without a size, ``limit`` sets it. Sets whose puzzles have no single reference answer get
    the answer "": score them with the set's own scorer.
    """
    try:
        gym = importlib.import_module("reasoning_gym")
        factory = importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise ValueError(
            f"kind reasoning_gym needs the package reasoning-gym, which cannot be imported: pip install "
            f"reasoning-gym. {error}"
        ) from error
    if source.name not in factory.DATASETS:
        near = or_nearest(str(source.name), factory.DATASETS)
        raise ValueError(f"reasoning_gym has no data set {source.name!r}: set name{near}")
    options: dict[str, Any] = {"seed": _split_seed(source.split), **source.options}
    if source.limit is not None:
        options.setdefault("size", source.limit)
    try:
        entries = gym.create_dataset(source.name, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"reasoning_gym {source.name} refuses the options {source.options}: {error}") from error
    for index in range(len(entries)):
        entry = entries[index]
        item_id = f"{source.name}-{options['seed']}-{index}"
        answer = "" if entry["answer"] is None else str(entry["answer"])
        question = entry["question"]
        extras = {"entry": entry, "dataset": source.name, "dataset_options": dict(source.options)}
        yield Item(where=f"entry {item_id}", id=item_id, prompt=question, answer=answer, extras=extras)


def _split_seed(split: str) -> int:
    # numpy's legacy generators, which some of the sets use, take 32 bits at most
    return derive_seed(0, f"data.reasoning_gym.{split}") >> 32

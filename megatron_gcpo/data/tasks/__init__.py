"""Packaged tasks: small generators of verifiable problems with several different correct solutions each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_gcpo.data.tasks.addition import Addition
from megatron_gcpo.data.tasks.base import SPLITS, Demonstration, Problem, Task
from megatron_gcpo.data.tasks.countdown import Countdown
from megatron_gcpo.data.tasks.matrix_games import MatrixGames
from megatron_gcpo.data.tasks.multiplication import Multiplication
from megatron_gcpo.names import did_you_mean

__all__ = ["SPLITS", "TASKS", "Demonstration", "Problem", "Task", "make_task", "task_class"]

TASKS: dict[str, type[Task]] = {task.name: task for task in (Addition, Multiplication, Countdown, MatrixGames)}
"""Every packaged task by name. ``TASKS[name].verify(answer, text)`` and ``.strategy(text)`` need no instance."""


def task_class(name: str | None) -> type[Task]:
    """The task of this name; ValueError names the nearest one."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}: use one of {', '.join(TASKS)}.{did_you_mean(name, TASKS)}")
    return TASKS[name]


def make_task(name: str | None, options: Mapping[str, Any] | None = None) -> Task:
    """A task with these options (the fields of its class).

    Raises:
        ValueError: unknown task or option (the nearest name is given), wrong type, impossible value.
    """
    cls = task_class(name)
    known = {f.name: f for f in fields(cls)}
    for key, value in (options or {}).items():
        if key not in known:
            hint = did_you_mean(key, known)
            raise ValueError(f"task {cls.name} has no option {key!r}: use one of {', '.join(known)}.{hint}")
        # Options come from YAML: "64" for a number must not travel further.
        if "int" in str(known[key].type) and (isinstance(value, bool) or not isinstance(value, int | None)):
            raise ValueError(f"task {cls.name}: option {key} is {value!r}, expected a whole number")
        if key == "weights" and not isinstance(value, Mapping | None):
            raise ValueError(f"task {cls.name}: option weights is {value!r}, expected a mapping of strategy to weight")
    return cls(**(options or {}))

"""Prompts: where they come from (sources, tasks), how they are tokenized, and which ones a step takes (sampler)."""

from megatron_gcpo.data.records import BadRow, PromptSet
from megatron_gcpo.data.sampler import PromptSampler, RowSampler
from megatron_gcpo.data.sources import load_prompts
from megatron_gcpo.data.tasks import TASKS, Task, make_task
from megatron_gcpo.data.tokenizer import build_task_tokenizer, load_tokenizer

__all__ = [
    "TASKS",
    "BadRow",
    "PromptSampler",
    "PromptSet",
    "RowSampler",
    "Task",
    "build_task_tokenizer",
    "load_prompts",
    "load_tokenizer",
    "make_task",
]

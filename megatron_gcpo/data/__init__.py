"""Prompts: where they come from (sources, tasks), how they are tokenized, and which ones a step takes (sampler)."""

from megatron_gcpo.data.curriculum import CurriculumSampler, Sampler, make_sampler
from megatron_gcpo.data.judged import JudgedSampler
from megatron_gcpo.data.records import BadRow, PromptSet
from megatron_gcpo.data.sampler import PromptSampler, RowSampler
from megatron_gcpo.data.sources import load_prompts
from megatron_gcpo.data.tasks import TASKS, Task, make_task
from megatron_gcpo.data.tokenizer import build_task_tokenizer, load_tokenizer

__all__ = [
    "TASKS",
    "BadRow",
    "CurriculumSampler",
    "JudgedSampler",
    "PromptSampler",
    "PromptSet",
    "RowSampler",
    "Sampler",
    "Task",
    "build_task_tokenizer",
    "load_prompts",
    "load_tokenizer",
    "make_sampler",
    "make_task",
]

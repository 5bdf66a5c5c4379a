"""The verifier of a packaged task (data/tasks), which reads the final answer with a parser of its own."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gcpo.verify.base import Sample, Verifier


@dataclass(frozen=True, kw_only=True)
class PackagedTask(Verifier):
    """What the task says of the completion: 1 or 0, or a grade in [0, 1] (matrix_games). Prompt.extras["task"] names the
    task unless ``task`` does."""

    task: str | None = None
    """addition, multiplication, countdown, matrix_games; default: what the prompt says."""

    def __post_init__(self) -> None:
        from megatron_gcpo.data.tasks import task_class

        if self.task is not None:
            task_class(self.task)

    def prepare(self, sample: Sample) -> None:
        from megatron_gcpo.data.tasks import task_class

        name = self._name(sample)
        if name is None:
            raise ValueError(
                "verify.name=task needs prompts of a packaged task: set data.train.kind to task, or verify.options.task"
                " to the task whose answers these are"
            )
        task_class(name)

    def judge(self, sample: Sample) -> float:
        from megatron_gcpo.data.tasks import task_class

        return float(task_class(self._name(sample)).verify(sample.answer, sample.completion))

    def _name(self, sample: Sample) -> str | None:
        return self.task or sample.extras.get("task")

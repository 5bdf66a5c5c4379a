"""An evaluation suite: a YAML file that names benchmarks, how answers are judged and how they are sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from megatron_gcpo.config.problems import load_record
from megatron_gcpo.config.records import DataConfig, EmbedConfig, Record, SourceConfig, VerifyConfig, VllmConfig
from megatron_gcpo.data.benchmarks import LAYOUTS
from megatron_gcpo.environments import ENVIRONMENTS, Environment

type EnvironmentName = Literal["none", "critic"]


class BenchmarkConfig(Record):
    """One set of problems."""

    name: str
    source: SourceConfig
    verify: VerifyConfig | None = None
    """How answers are judged; default: what the source's layout, task or reasoning_gym set goes with."""
    samples: PositiveInt | None = None
    """Default: the suite's."""
    max_new_tokens: PositiveInt | None = None
    """Default: the suite's."""
    environment: EnvironmentName | None = None
    """Default: the suite's."""

    @model_validator(mode="after")
    def _can_be_judged(self) -> BenchmarkConfig:
        if self.verify is None and self.source.layout is None and self.source.kind not in ("task", "reasoning_gym"):
            raise ValueError(
                f"benchmark {self.name!r} has no verify section, and its source has no layout that implies one"
            )
        return self

    @property
    def verifier(self) -> VerifyConfig:
        if self.verify is not None:
            return self.verify
        if self.source.layout is not None:
            return VerifyConfig(name=LAYOUTS[self.source.layout].verifier)
        return VerifyConfig(name=self.source.kind)


class SuiteConfig(Record):
    """A suite. Field names are YAML keys; unknown keys fail."""

    benchmarks: tuple[BenchmarkConfig, ...] = Field(min_length=1)
    samples: PositiveInt = 8
    """Answers drawn for each problem."""
    ks: tuple[PositiveInt, ...] = (1, 8)
    """The k of pass@k, maj@k and distinct@k; each at most ``samples``."""
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_new_tokens: PositiveInt = 4096
    """Of each turn."""
    environment: EnvironmentName = "none"
    """none: single answers; else the conversation in which problems are solved: its last answer counts, and what became of
    the answers before it is measured too (environments)."""
    seed: int = Field(default=0, ge=0)
    template: Literal["chat", "plain"] = "chat"
    system_prompt: str | None = None
    max_prompt_tokens: PositiveInt = 2048
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """What to do with a row that cannot be read or is too long."""
    engine: Literal["transformers", "vllm"] = "transformers"
    dtype: Literal["fp32", "bf16"] = "bf16"
    vllm: VllmConfig = VllmConfig()
    max_batch_rows: PositiveInt = 256
    embed: EmbedConfig | None = EmbedConfig()
    """For the diversity of correct answers; null: not measured."""
    trained_on: SourceConfig | None = None
    """The training prompts: problems that share 13-grams with them are named."""

    @model_validator(mode="after")
    def _fits(self) -> SuiteConfig:
        names = [benchmark.name for benchmark in self.benchmarks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"benchmarks must have different names, {', '.join(twice)} occurs more than once")
        for benchmark in self.benchmarks:
            samples = benchmark.samples or self.samples
            if too_large := [k for k in self.ks if k > samples]:
                raise ValueError(f"ks {too_large} need as many samples, benchmark {benchmark.name!r} has {samples}")
        return self

    def environment_of(self, benchmark: BenchmarkConfig) -> Environment | None:
        """The conversation in which a benchmark's problems are solved; None: single answers."""
        return ENVIRONMENTS.get(benchmark.environment or self.environment)

    def data(self, source: SourceConfig) -> DataConfig:
        """The data section with which the source's prompts are templated."""
        return DataConfig(
            train=source,
            template=self.template,
            system_prompt=self.system_prompt,
            max_prompt_tokens=self.max_prompt_tokens,
            on_bad_row=self.on_bad_row,
        )


def load_suite(path: str | Path) -> SuiteConfig:
    """The suite in a file.

    Raises:
        ValueError: no such file, no YAML, or one line for each field that is wrong.
    """
    return load_record(path, SuiteConfig, "suite", "benchmarks")

"""``megatron-gcpo eval``: a checkpoint against a suite of benchmarks, with intervals, as a table and as JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_gcpo.cluster.platform import Platform
from megatron_gcpo.config.records import Config, RolloutConfig, SourceConfig
from megatron_gcpo.data import load_prompts, load_tokenizer
from megatron_gcpo.data.template import turn_frame
from megatron_gcpo.embed import Encoder
from megatron_gcpo.environments import Frame, checked_frame, converse, longest_sequence, score
from megatron_gcpo.evaluate.contamination import Overlap, find_overlaps
from megatron_gcpo.evaluate.intervals import Interval, finite, mean_interval
from megatron_gcpo.evaluate.majority import majority_at_k
from megatron_gcpo.evaluate.report import PromptEval, per_prompt
from megatron_gcpo.evaluate.run import measure, task_labeller
from megatron_gcpo.evaluate.suite import BenchmarkConfig, SuiteConfig
from megatron_gcpo.rollout import RolloutEngine, Sampling
from megatron_gcpo.types import Prompt
from megatron_gcpo.verify.pool import VerifierPool


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """One benchmark: its metrics with intervals over problems, and what is worth knowing of single problems."""

    name: str
    num_problems: int
    samples: int
    metrics: Mapping[str, Interval]
    problems: tuple[Mapping[str, Any], ...]
    """Per problem: id, correct (share), majority (whether the plurality of all samples is right), mean_tokens."""
    overlaps: tuple[Overlap, ...] | None
    """Problems that share n-grams with the training prompts; None: nobody said what these are."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is evaluated, ready to be sampled from."""

    engine: RolloutEngine
    tokenizer: Any


def evaluate_checkpoint(
    path: Path, suite: SuiteConfig, platform: Platform, console: Console, *, training: Sequence[str] | None = None
) -> tuple[BenchmarkResult, ...]:
    """Every benchmark of a suite, in its order.

    Args:
        path: a Hugging Face folder, a run's folder or one of its checkpoints.
        training: texts of the training prompts, for the overlap check; None: ``suite.trained_on``, or no check.

    Raises:
        ValueError: the checkpoint cannot be read, a benchmark's file or rows are bad, a prompt does not fit: found for
            all benchmarks before the first token is drawn.
    """
    from megatron_gcpo.convert import hf_folder
    from megatron_gcpo.rollout.build import make_engine

    with _as_hf_folder(path, console) as folder:
        opened = hf_folder.open_folder(folder)
        config = _config(folder, suite)
        tokenizer = _tokenizer(path, config)
        sets = [_prompts(b.source, suite, tokenizer, f"benchmark {b.name!r}") for b in suite.benchmarks]
        frames = [
            checked_frame(turn_frame(suite.data(b.source), tokenizer), suite.environment_of(b), own)
            for b, own in zip(suite.benchmarks, sets, strict=True)
        ]
        if training is None and suite.trained_on is not None:
            training = [p.text for p in _prompts(suite.trained_on, suite, tokenizer, "trained_on")]
        engine = make_engine(config, opened.config, platform)
        try:
            for benchmark, prompts in zip(suite.benchmarks, sets, strict=True):
                _check_fits(benchmark, suite, prompts, engine.max_positions)
            engine.load_weights(opened.tensors.items())
            subject = Subject(engine=engine, tokenizer=tokenizer)
            encoder = Encoder(suite.embed, platform.device) if suite.embed is not None else None
            results = []
            for benchmark, prompts, frame in zip(suite.benchmarks, sets, frames, strict=True):
                console.print(f"{benchmark.name}: {len(prompts)} problems", highlight=False)
                results.append(_run(benchmark, suite, subject, prompts, frame, encoder, training))
        finally:
            engine.close()
    return tuple(results)


@contextmanager
def _as_hf_folder(path: Path, console: Console) -> Iterator[Path]:
    """The checkpoint as a Hugging Face folder; one of ours is converted into a temporary one."""
    from megatron_gcpo.convert import hf_folder, to_hf

    if hf_folder.holds_weights(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="megatron_gcpo_eval_") as scratch:
        console.print(f"{path} is no Hugging Face folder: converting its newest checkpoint", highlight=False)
        yield to_hf.convert(path, Path(scratch) / "hf")


def _prompts(source: SourceConfig, suite: SuiteConfig, tokenizer: Any, who: str) -> tuple[Prompt, ...]:
    try:
        return tuple(load_prompts(source, suite.data(source), tokenizer).prompts)
    except ValueError as error:  # said in the terms of a run
        said = str(error).removeprefix("data.train: ").replace("data.", "")
        raise ValueError(f"{who}: {said}") from None


def _check_fits(benchmark: BenchmarkConfig, suite: SuiteConfig, prompts: Sequence[Prompt], positions: int) -> None:
    limit, environment = benchmark.max_new_tokens or suite.max_new_tokens, suite.environment_of(benchmark)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    if (needed := longest_sequence(environment, len(longest.token_ids), limit)) > positions:
        raise ValueError(
            f"benchmark {benchmark.name!r}: prompt {longest.id!r} has {len(longest.token_ids)} tokens and with its "
            f"answers up to {needed}, but the model holds {positions} positions: lower max_new_tokens from {limit}"
        )


def _config(folder: Path, suite: SuiteConfig) -> Config:
    """What an engine wants to know, said in the terms of a run."""
    longest = max(benchmark.max_new_tokens or suite.max_new_tokens for benchmark in suite.benchmarks)
    positions = suite.vllm.max_model_len or max(
        longest_sequence(
            suite.environment_of(benchmark), suite.max_prompt_tokens, benchmark.max_new_tokens or suite.max_new_tokens
        )
        for benchmark in suite.benchmarks
    )
    rollout = RolloutConfig(
        engine=suite.engine,
        vllm=suite.vllm.model_copy(update={"max_model_len": positions}),
        dtype=suite.dtype,
        max_new_tokens=longest,
        max_batch_rows=suite.max_batch_rows,
    )
    data = suite.data(suite.benchmarks[0].source)
    return Config.model_validate({"model": {"path": str(folder)}, "data": data, "rollout": rollout})


def _tokenizer(path: Path, config: Config) -> Any:
    """The folder's own; for a run on a packaged task, that of the task."""
    from megatron_gcpo.observe.history import read_history

    run = next((p for p in (path, *path.parents[:2]) if (p / "config.yaml").is_file()), None)
    if run is not None:
        trained = Config.model_validate(read_history(run).config)
        return load_tokenizer(trained.model, trained.data.train)
    return load_tokenizer(config.model)


def _run(
    benchmark: BenchmarkConfig,
    suite: SuiteConfig,
    subject: Subject,
    prompts: Sequence[Prompt],
    frame: Frame,
    encoder: Encoder | None,
    training: Sequence[str] | None,
) -> BenchmarkResult:
    samples = benchmark.samples or suite.samples
    groups = converse(
        subject.engine,
        prompts,
        suite.environment_of(benchmark),
        frame=frame,
        group_size=samples,
        max_new_tokens=benchmark.max_new_tokens or suite.max_new_tokens,
        sampling=Sampling(
            temperature=suite.temperature,
            top_p=suite.top_p,
            top_k=suite.top_k,
            stop_token_ids=(subject.tokenizer.eos_token_id,),
        ),
        decode=lambda ids: subject.tokenizer.decode(ids, skip_special_tokens=True),
        run_seed=suite.seed,
        step=0,
        stream=f"evaluate/{benchmark.name}",
    )
    with VerifierPool(benchmark.verifier) as pool:
        verdicts = score(pool, groups)
    records = measure(groups, verdicts, encoder=encoder, labeller=task_labeller(benchmark.source))
    overlaps = None if training is None else tuple(find_overlaps([(p.id, p.text) for p in prompts], training))
    return BenchmarkResult(
        name=benchmark.name,
        num_problems=len(prompts),
        samples=samples,
        metrics=_intervals(records, suite, samples),
        problems=tuple(
            {
                "id": record.prompt_id,
                "correct": record.num_correct / record.num_samples,
                "majority": majority_at_k(record.answers_n, record.correct_n, samples),
                "mean_tokens": record.mean_tokens,
            }
            for record in records
        ),
        overlaps=overlaps,
    )


def _intervals(records: Sequence[PromptEval], suite: SuiteConfig, samples: int) -> dict[str, Interval]:
    """Each metric is a mean over problems, so that its interval is the bootstrap over problems."""
    values = per_prompt(records, suite.ks)
    values.pop("pass@1", None)  # the same as avg
    return {
        f"avg@{samples}" if name == "avg" else name: mean_interval(column, seed=suite.seed)
        for name, column in values.items()
    }


def results_table(results: Sequence[BenchmarkResult], title: str) -> Table:
    """A row per metric, a column per benchmark, each with its 95 % interval over problems."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(f"{result.name}\n{result.num_problems} x {result.samples}", justify="right")
    for name in dict.fromkeys(name for result in results for name in result.metrics):
        table.add_row(name, *(str(result.metrics.get(name, "-")) for result in results))
    if any(result.overlaps is not None for result in results):
        counts = ("-" if result.overlaps is None else str(len(result.overlaps)) for result in results)
        table.add_row("problems that overlap with training", *counts)
    return table


def write_results(path: Path, checkpoint: Path, suite: SuiteConfig, results: Sequence[BenchmarkResult]) -> None:
    """Everything as JSON, whole or not at all."""
    content = {
        "checkpoint": str(checkpoint),
        "suite": suite.model_dump(mode="json"),
        "benchmarks": [asdict(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(finite(content), indent=1), encoding="utf-8")
    unfinished.replace(path)

"""``megatron-gcpo eval``: a checkpoint against a suite of benchmarks, with intervals, as a table and as JSON."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_gcpo.cluster.platform import Platform
from megatron_gcpo.config.records import Config, RolloutConfig
from megatron_gcpo.data import load_prompts, load_tokenizer, make_task
from megatron_gcpo.embed import Encoder
from megatron_gcpo.evaluate.contamination import Overlap, find_overlaps
from megatron_gcpo.evaluate.diversity import distinct_at_k
from megatron_gcpo.evaluate.intervals import Interval, mean_interval
from megatron_gcpo.evaluate.majority import majority_at_k
from megatron_gcpo.evaluate.passk import pass_at_k
from megatron_gcpo.evaluate.report import PromptEval
from megatron_gcpo.evaluate.run import measure
from megatron_gcpo.evaluate.suite import BenchmarkConfig, SuiteConfig
from megatron_gcpo.rollout import RolloutEngine, Sampling, generate_groups
from megatron_gcpo.types import Group, Prompt
from megatron_gcpo.verify.pool import VerifierPool
from megatron_gcpo.verify.verifiers.extract import final_answer, normalise


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """One benchmark: its metrics with intervals over problems, and what is worth knowing of single problems."""

    name: str
    num_problems: int
    samples: int
    metrics: Mapping[str, Interval]
    problems: tuple[Mapping[str, Any], ...]
    """Per problem: id, correct (share), majority (whether the plurality of all samples is right), mean_tokens."""
    overlaps: tuple[Overlap, ...]
    """Problems that share n-grams with the training prompts."""


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
    with open_subject(path, suite, platform, console) as subject:
        sets = [
            load_prompts(benchmark.source, suite.data(benchmark.source), subject.tokenizer)
            for benchmark in suite.benchmarks
        ]
        if training is None and suite.trained_on is not None:
            source = suite.trained_on
            training = [p.text for p in load_prompts(source, suite.data(source), subject.tokenizer).prompts]
        encoder = Encoder(suite.embed, platform.device) if suite.embed is not None else None
        results = []
        for benchmark, prompts in zip(suite.benchmarks, sets, strict=True):
            console.print(f"{benchmark.name}: {len(prompts)} problems", highlight=False)
            results.append(_run(benchmark, suite, subject, prompts.prompts, encoder, training))
    return tuple(results)


@contextmanager
def open_subject(path: Path, suite: SuiteConfig, platform: Platform, console: Console) -> Iterator[Subject]:
    """Engine and tokenizer of a checkpoint; one of ours is converted into a temporary folder first."""
    from megatron_gcpo.convert import hf_folder, to_hf
    from megatron_gcpo.rollout.build import make_engine

    with tempfile.TemporaryDirectory(prefix="megatron_gcpo_eval_") as scratch:
        folder = path
        if not hf_folder.holds_weights(path):
            console.print(f"{path} is no Hugging Face folder: converting its newest checkpoint", highlight=False)
            folder = to_hf.convert(path, Path(scratch) / "hf")
        opened = hf_folder.open_folder(folder)
        config = _config(folder, suite)
        tokenizer = _tokenizer(path, config)
        engine = make_engine(config, opened.config, platform)
        engine.load_weights(opened.tensors.items())
        yield Subject(engine=engine, tokenizer=tokenizer)


def _config(folder: Path, suite: SuiteConfig) -> Config:
    """What an engine wants to know, said in the terms of a run."""
    longest = max(benchmark.max_new_tokens or suite.max_new_tokens for benchmark in suite.benchmarks)
    rollout = RolloutConfig(
        engine=suite.engine,
        vllm=suite.vllm,
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
    encoder: Encoder | None,
    training: Sequence[str] | None,
) -> BenchmarkResult:
    samples = benchmark.samples or suite.samples
    groups = generate_groups(
        subject.engine,
        prompts,
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
        verdicts = pool.score(groups)
    records = measure(groups, verdicts, encoder=encoder, labeller=_labeller(benchmark))
    answers = [_answers(group) for group in groups]
    overlaps = find_overlaps([(p.id, p.text) for p in prompts], training) if training is not None else []
    return BenchmarkResult(
        name=benchmark.name,
        num_problems=len(prompts),
        samples=samples,
        metrics=_metrics(records, answers, suite, samples),
        problems=tuple(
            {
                "id": record.prompt_id,
                "correct": record.num_correct / record.num_samples,
                "majority": majority_at_k(found, record.correct_n, samples),
                "mean_tokens": record.mean_tokens,
            }
            for record, found in zip(records, answers, strict=True)
        ),
        overlaps=tuple(overlaps),
    )


def _labeller(benchmark: BenchmarkConfig) -> Callable[[Prompt, str], str | None] | None:
    if benchmark.source.kind != "task":
        return None
    strategy = make_task(benchmark.source.name, benchmark.source.options).strategy
    return lambda _, text: None if (name := strategy(text)) == "none" else name


def _answers(group: Group) -> list[str | None]:
    """The normalised final answers, hashed: they are only compared."""
    found = (final_answer(rollout.text) for rollout in group.rollouts)
    return [None if text is None else hashlib.blake2b(normalise(text).encode()).hexdigest() for text in found]


def _metrics(
    records: Sequence[PromptEval], answers: Sequence[Sequence[str | None]], suite: SuiteConfig, samples: int
) -> dict[str, Interval]:
    """Each metric is a mean over problems, so that its interval is the bootstrap over problems."""
    values: dict[str, list[float]] = {f"avg@{samples}": [r.num_correct / r.num_samples for r in records]}
    for k in suite.ks:
        if k > 1:
            values[f"pass@{k}"] = [pass_at_k(r.num_samples, r.num_correct, k) for r in records]
            pairs = zip(records, answers, strict=True)
            values[f"maj@{k}"] = [majority_at_k(found, r.correct_n, k) for r, found in pairs]
        if all(r.labels_n is not None for r in records):
            labels = [
                [label if right else None for label, right in zip(r.labels_n or (), r.correct_n, strict=True)]
                for r in records
            ]
            values[f"distinct@{k}"] = [distinct_at_k(row, k) for row in labels]
    for name in ("vendi", "effective_rank"):
        known = [value for r in records if (value := getattr(r, name)) is not None]
        if known:
            values[name] = known
    values["mean_tokens"] = [r.mean_tokens for r in records]
    values["truncated"] = [r.truncated / r.num_samples for r in records]
    return {name: mean_interval(column, seed=suite.seed) for name, column in values.items()}


def results_table(results: Sequence[BenchmarkResult], title: str) -> Table:
    """A row per metric, a column per benchmark, each with its 95 % interval over problems."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(f"{result.name}\n{result.num_problems} x {result.samples}", justify="right")
    for name in dict.fromkeys(name for result in results for name in result.metrics):
        table.add_row(name, *(str(result.metrics.get(name, "-")) for result in results))
    if any(result.overlaps for result in results):
        table.add_row("overlaps with training", *(str(len(result.overlaps)) for result in results))
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
    unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
    unfinished.replace(path)

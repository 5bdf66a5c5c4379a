"""The command line: ``megatron-gcpo train|serve RECIPE [section.field=value ...]``, ``eval CHECKPOINT``, ``runs``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_gcpo.cluster import launch
from megatron_gcpo.config import Config, load
from megatron_gcpo.usage import exit_code, make_console

SERVE_HELP = """Starts a vLLM server for each of rollout.vllm.urls that is on this machine, waits until they are ready, and
starts those that die again; Ctrl-C or SIGTERM ends them. They hold random numbers until a trainer pushes its weights.
Whoever can talk to a server can replace its weights and run functions of its workers: servers listen on 127.0.0.1, where
every user of this machine reaches them. --host lets other machines in, and needs rollout.vllm.api_key_file, a file with a
secret word that the trainer reads too: then every path but /health asks for it. It travels unencrypted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command and of every rank it starts; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(argv)
    if launch.is_worker():
        return launch.run_worker(lambda: _work(arguments))
    return exit_code(lambda: COMMANDS[arguments.command](arguments, argv))


def run_folder(config: Config) -> Path:
    """Where a run lives."""
    return Path(config.run.output_dir.format(name=config.run.name, seed=config.run.seed))


def _train(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from megatron_gcpo.preflight import describe, preflight

    config = _recipe(arguments)
    folder = run_folder(config)
    if arguments.dry_run:
        describe(config, folder, make_console())
        return 0
    if _is_finished(config, folder):
        return 0
    preflight(config, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run.output_dir {folder} cannot be made ({error.strerror}): choose another") from None
    return launch.run(config.cluster, argv, log_dir=folder / "logs")


def _recipe(arguments: argparse.Namespace) -> Config:
    """The configuration of ``train``; ``--profile steps=3,4`` is short for observe.profile_steps=[3,4]."""
    profile = arguments.profile
    if profile is None:
        return load(arguments.recipe, arguments.overrides)
    name, _, steps = profile.partition("=")
    if name != "steps" or not all(step.isdigit() and int(step) for step in steps.split(",")):
        raise ValueError(f"--profile {profile!r}: write --profile steps=3,4 (steps count from 1)")
    return load(arguments.recipe, [*arguments.overrides, f"observe.profile_steps=[{steps}]"])


def _serve(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from megatron_gcpo.rollout.vllm.serve import Wish, serve

    config = load(arguments.recipe, arguments.overrides)
    wish = Wish(host=arguments.host, port=arguments.port, replicas=arguments.replicas, insecure=arguments.insecure)
    return serve(config, run_folder(config), wish, launch.inherited_environment(), dry_run=arguments.dry_run)


def _eval(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from megatron_gcpo.evaluate.suite import load_suite

    suite = load_suite(arguments.suite)
    from megatron_gcpo.cluster.platform import install

    platform = install("auto")
    from megatron_gcpo.evaluate.checkpoint import evaluate_checkpoint, results_table, write_results

    checkpoint, console = Path(arguments.checkpoint), make_console()
    results = evaluate_checkpoint(checkpoint, suite, platform, console)
    console.print(results_table(results, f"{checkpoint}: means and 95 % intervals over problems"))
    for result in results:
        for overlap in (result.overlaps or ())[:5]:
            console.print(
                f"{result.name} {overlap.prompt_id}: {100 * overlap.share:.0f} % of its 13-grams are in the training "
                f"prompts, e.g. {overlap.example!r}",
                highlight=False,
                markup=False,
            )
    if arguments.output is not None:
        write_results(Path(arguments.output), checkpoint, suite, results)
    return 0


def _runs(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from megatron_gcpo.observe.runs import runs_table

    make_console().print(runs_table(Path(arguments.folder)))
    return 0


def _is_finished(config: Config, folder: Path) -> bool:
    """A finished run is shown again, not repeated."""
    from megatron_gcpo.observe.summary import print_summary, read_summary

    summary = read_summary(folder)
    if summary is None or summary.step < config.run.steps or config.run.resume == "never":
        return False
    print_summary(summary, config.run.name, folder, make_console())
    print(f"{folder} is finished: remove it, raise run.steps or choose another run.output_dir to train again")
    return True


def _work(arguments: argparse.Namespace) -> int:
    from megatron_gcpo.cluster.platform import install

    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    config = _recipe(arguments)
    platform = install(config.cluster.platform)  # before anything of Megatron is imported, which warns otherwise
    from megatron_gcpo.loop import work

    return work(config, run_folder(config), platform)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-gcpo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train as a recipe says, going on where an earlier run stopped")
    _add_recipe(train)
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration, rank grid, parameters and batch arithmetic; start nothing",
    )
    train.add_argument(
        "--profile", metavar="steps=N,M", help="write a trace of these steps into the run's profile/ folder"
    )
    serve = commands.add_parser(
        "serve",
        help="keep the rollout servers of a recipe alive on this machine",
        description=SERVE_HELP,
    )
    _add_recipe(serve)
    serve.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, help="of the first server, instead of the ports of rollout.vllm.urls")
    serve.add_argument("--replicas", type=int, help="how many servers, instead of those of rollout.vllm.urls")
    serve.add_argument("--insecure", action="store_true", help="listen beyond this machine without a key")
    serve.add_argument("--dry-run", action="store_true", help="print the commands; start nothing")
    evaluate = commands.add_parser("eval", help="measure a checkpoint on a suite of benchmarks")
    evaluate.add_argument("checkpoint", help="a Hugging Face folder, a run's folder or one of its checkpoints")
    evaluate.add_argument("--suite", required=True, help="YAML file, e.g. configs/suite/quickstart.yaml")
    evaluate.add_argument("--output", help="JSON file for all results, problem by problem")
    runs = commands.add_parser("runs", help="list runs with their state, step and key numbers")
    runs.add_argument("folder", nargs="?", default="runs", help="where to look (default: runs)")
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file, e.g. configs/recipe/quickstart.yaml")
    parser.add_argument(
        "overrides", nargs="*", help="section.field=value, or a piece such as method/grpo in place of the recipe's"
    )


COMMANDS = {"train": _train, "serve": _serve, "eval": _eval, "runs": _runs}

if __name__ == "__main__":
    sys.exit(main())

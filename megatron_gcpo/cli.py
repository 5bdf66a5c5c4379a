"""The command line: ``megatron-gcpo train RECIPE [section.field=value | folder/piece ...] [--dry-run]``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_gcpo.cluster import launch
from megatron_gcpo.config import Config, load


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command and of every rank it starts; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(argv)
    if launch.is_worker():
        return launch.run_worker(lambda: _work(arguments))
    try:
        config = load(arguments.recipe, arguments.overrides)
        return _train(config, arguments, argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_folder(config: Config) -> Path:
    """Where a run lives."""
    return Path(config.run.output_dir.format(name=config.run.name, seed=config.run.seed))


def _train(config: Config, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    from megatron_gcpo.preflight import describe, preflight

    folder = run_folder(config)
    if arguments.dry_run:
        describe(config, folder, Console())
        return 0
    if _is_finished(config, folder):
        return 0
    preflight(config, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run.output_dir {folder} cannot be made ({error.strerror}): choose another") from None
    return launch.run(config.cluster, argv, log_dir=folder / "logs")


def _is_finished(config: Config, folder: Path) -> bool:
    """A finished run is shown again, not repeated."""
    from megatron_gcpo.observe.summary import print_summary, read_summary

    summary = read_summary(folder)
    if summary is None or summary.step < config.run.steps or config.run.resume == "never":
        return False
    print_summary(summary, config.run.name, folder, Console())
    print(f"{folder} is finished: remove it, raise run.steps or choose another run.output_dir to train again")
    return True


def _work(arguments: argparse.Namespace) -> int:
    from megatron_gcpo.cluster.platform import install

    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    config = load(arguments.recipe, arguments.overrides)
    platform = install(config.cluster.platform)  # before anything of Megatron is imported, which warns otherwise
    from megatron_gcpo.loop import work

    return work(config, run_folder(config), platform)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-gcpo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train as a recipe says, going on where an earlier run stopped")
    train.add_argument("recipe", help="YAML file, e.g. configs/recipe/quickstart.yaml")
    train.add_argument(
        "overrides", nargs="*", help="section.field=value, or a piece such as method/grpo in place of the recipe's"
    )
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration, rank grid, parameters and batch arithmetic; start nothing",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

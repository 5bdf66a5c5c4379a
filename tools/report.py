"""A page about runs: curves, and a look into the groups. One HTML file that needs no network.

python tools/report.py runs/quickstart
python tools/report.py runs/compare/* --output runs/compare.html      # side by side, seeds as bands
python tools/report.py runs/quickstart --follow                       # of a run that still goes on, on 127.0.0.1

The page holds all curves and a sample of the groups, and says how large a one. Measured on a run of 1,000,448 rollouts of 100
tokens in 1,954 steps: 20 CPU-seconds with embeddings, 1.2 GB of memory, a page of 9.5 MB (tools/bench_report.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_gcpo.embed.kept import KeptEncoder
from megatron_gcpo.observe.history import read_history
from megatron_gcpo.observe.replay import embed_config
from megatron_gcpo.report.follow import HOST, Page, make_server
from megatron_gcpo.report.page import render, write
from megatron_gcpo.report.payload import Sampled, payload
from megatron_gcpo.usage import exit_code


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    folders = [Path(run) for run in arguments.runs]
    return exit_code(lambda: _report(folders, arguments))


def _report(folders: Sequence[Path], arguments: argparse.Namespace) -> None:
    folders = _readable(folders)
    config, unknown = embed_config(read_history(folders[0]))
    for line in unknown:
        print(f"{folders[0]}: skipped {line}")
    encoder = None if arguments.no_embed else KeptEncoder(config, folders[0] / "replay")
    sampled = Sampled(steps=arguments.steps, prompts=arguments.prompts)
    if arguments.follow:
        page = Page(
            lambda: [read_history(folder).modified for folder in folders],
            lambda: render(payload(folders, sampled, encoder, config.span), refresh_s=arguments.refresh_s),
        )
        with make_server(page, arguments.port) as server:
            print(f"http://{HOST}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                return
    path = Path(arguments.output) if arguments.output else folders[0] / "report.html"
    content = payload(folders, sampled, encoder, config.span)
    for run in content["runs"]:
        for line in run["skipped"]:
            print(f"{run['folder']}: skipped {line}")
    write(path, content)
    print(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB)")


def _readable(folders: Sequence[Path]) -> list[Path]:
    """Those that hold a run; the others are named. Raises ValueError when there is none."""
    found, problems = [], []
    for folder in folders:
        try:
            read_history(folder)
        except ValueError as error:
            problems.append(str(error))
        else:
            found.append(folder)
    if not found:
        raise ValueError("\n".join(problems))
    for problem in problems:
        print(f"left out: {problem}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--output", help="default: report.html in the first run's folder")
    parser.add_argument("--steps", type=int, default=12, help="steps whose groups can be looked at, spread evenly")
    parser.add_argument("--prompts", type=int, default=8, help="groups of each of these steps")
    parser.add_argument("--no-embed", action="store_true", help="no similarities: faster")
    parser.add_argument("--follow", action="store_true", help="serve the page on 127.0.0.1 and keep it up to date")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--refresh-s", type=float, default=15.0)
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""A page about runs: curves, and a look into the groups. One HTML file that needs no network.

python tools/report.py runs/quickstart
python tools/report.py runs/compare/* --output runs/compare.html      # side by side, seeds as bands
python tools/report.py runs/quickstart --follow                       # of a run that still goes on, on 127.0.0.1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_gcpo.config.records import EmbedConfig
from megatron_gcpo.embed.kept import KeptEncoder
from megatron_gcpo.observe.history import read_history
from megatron_gcpo.report.follow import HOST, Page, make_server
from megatron_gcpo.report.page import render, write
from megatron_gcpo.report.payload import Sampled, payload


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    folders = [Path(run) for run in arguments.runs]
    try:
        _report(folders, arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _report(folders: Sequence[Path], arguments: argparse.Namespace) -> None:
    first = read_history(folders[0])
    own = first.config.get("embed")
    known = {k: v for k, v in own.items() if k in EmbedConfig.model_fields} if isinstance(own, dict) else {}
    config = EmbedConfig.model_validate(known)
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
    write(path, payload(folders, sampled, encoder, config.span))
    print(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB)")


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

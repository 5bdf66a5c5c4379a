"""Run grids of runs and say what they show.

    python tools/ablate.py configs/ablation/group_size.yaml
    python tools/ablate.py configs/ablation/*.yaml --summarize          # only what is finished, nothing is started
    python tools/ablate.py FILE --slurm nodes=2 gpus_per_node=8 timeout_min=600 slurm_partition=h100

Every cell runs once: finished ones are not repeated, interrupted ones go on. A cell that fails is listed and stops nobody
else. Each ablation writes summary.md, summary.json and plots into runs/ablation/NAME.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from megatron_gcpo.ablate import execute
from megatron_gcpo.ablate.grid import AblationConfig, cells, load_ablation
from megatron_gcpo.ablate.plots import draw
from megatron_gcpo.ablate.summarize import fit_trends, markdown, summarize, table


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    console, failed = Console(), 0
    try:
        ablations = [load_ablation(path) for path in arguments.files]
        for ablation in ablations:
            failed += _ablate(ablation, Path(arguments.output) / ablation.name, arguments, console)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if failed else 0


def _ablate(ablation: AblationConfig, root: Path, arguments: argparse.Namespace, console: Console) -> int:
    wanted = cells(ablation)
    finished = sum(execute.is_finished(cell.folder(root)) for cell in wanted)
    console.print(f"{ablation.name}: {len(wanted)} runs, {finished} of them finished", highlight=False)
    failures: list[execute.Failure] = []
    if not arguments.summarize:
        for command in execute.warm_starts(ablation, root):
            if subprocess.run(command, check=False).returncode:
                raise ValueError(f"the warm start failed, see above: {' '.join(command)}; no cell was started")
        if arguments.slurm is not None:
            jobs = execute.submit(ablation, wanted, root, _parameters(arguments.slurm), cluster=arguments.cluster)
            console.print(f"{len(jobs)} jobs were submitted; run again with --summarize when they are done")
            return 0
        failures = execute.run_here(
            ablation, wanted, root, lambda line: console.print(line, highlight=False, markup=False)
        )
    rows = summarize(ablation, root)
    lines = fit_trends(ablation, rows)
    if not rows:
        console.print("nothing is finished yet")
        return len(failures)
    console.print(table(ablation, rows))
    (root / "summary.md").write_text(markdown(ablation, rows, lines, failures), encoding="utf-8")
    content = {"rows": [asdict(row) for row in rows], "trends": [asdict(line) for line in lines]}
    (root / "summary.json").write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    plots = draw(ablation, rows, root)
    console.print(f"written to {root}: summary.md, summary.json, {', '.join(p.name for p in plots)}", highlight=False)
    for failure in failures:
        console.print(f"not finished: {failure.cell.name} seed {failure.cell.seed}: {failure.reason}", markup=False)
    return len(failures)


def _parameters(pairs: Sequence[str]) -> dict[str, Any]:
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--slurm {pair!r} has no '=': write name=value, names are submitit's")
    return {name: yaml.safe_load(value) for name, _, value in (pair.partition("=") for pair in pairs)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="YAML files, e.g. configs/ablation/group_size.yaml")
    parser.add_argument("--output", default="runs/ablation")
    parser.add_argument("--summarize", action="store_true", help="start nothing")
    parser.add_argument(
        "--slurm", nargs="*", metavar="NAME=VALUE", help="submit through submitit with these parameters"
    )
    parser.add_argument("--cluster", default="slurm", choices=["slurm", "local"], help="submitit's executor")
    return parser


if __name__ == "__main__":
    sys.exit(main())

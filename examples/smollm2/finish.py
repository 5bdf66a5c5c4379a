"""After training: take the padded heads off the exported checkpoint again, show its text, and print the runs side by side.

python -m examples.smollm2.finish runs/smollm2/gcpo runs/smollm2/grpo --final runs/smollm2/final
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import logging as transformers_logging

from examples.smollm2.generate import PROMPTS, greedy
from examples.smollm2.heads import strip_heads
from megatron_gcpo.convert.hf_folder import open_folder
from megatron_gcpo.convert.hf_writer import write_checkpoint
from megatron_gcpo.observe.summary import read_summary

GROUPS = 3
"""Key-value heads of SmolLM2-135M."""
SHOWN = ("pass@1", "pass@8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs; the first one's export is taken")
    parser.add_argument("--final", type=Path, required=True, help="where the checkpoint in its original shape goes")
    arguments = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    exported = max((arguments.runs[0] / "hf").glob("step_*[0-9]"))
    restore_shape(exported, arguments.final)
    before, after = greedy(exported), greedy(arguments.final)
    assert before == after, f"got other text without the padded heads: {after}, expected {before}"
    print(f"{arguments.final}: trained by {arguments.runs[0].name}, with the {GROUPS} key-value heads it came with")
    for prompt, text in zip(PROMPTS, after, strict=True):
        print(f"  {prompt!r} -> {text!r}")
    Console().print(side_by_side(arguments.runs))
    return 0


def restore_shape(exported: Path, final: Path) -> None:
    folder = open_folder(exported)
    config = folder.config
    assert isinstance(config, LlamaConfig), f"got {type(config).__name__}, expected the config of a Llama model"
    state, narrow = strip_heads(dict(folder.tensors), config, GROUPS)
    narrow.architectures = [LlamaForCausalLM.__name__]
    write_checkpoint(final, state.items(), hf_config=narrow, carry_from=exported)


def side_by_side(runs: list[Path]) -> Table:
    table = Table("held-out problems", "at the start", *(run.name for run in runs))
    summaries = [read_summary(run) for run in runs]
    for name in SHOWN:
        cells = [f"{s.after[name]:.3f}" if s and s.after else "-" for s in summaries]
        first = summaries[0]
        table.add_row(name, f"{first.before[name]:.3f}" if first and first.before else "-", *cells)
    minutes = [f"{s.phase_seconds['total'] / 60:.1f}" if s else "-" for s in summaries]
    table.add_row("minutes of training", "", *minutes)
    return table


if __name__ == "__main__":
    sys.exit(main())

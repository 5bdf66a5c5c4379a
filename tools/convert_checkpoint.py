"""Hugging Face checkpoints to the trainer's own and back, streamed, with nothing but a shard in memory.

    python tools/convert_checkpoint.py hf-to-megatron SRC DST [--tp 2 --pp 2 ...]
    python tools/convert_checkpoint.py megatron-to-hf SRC DST [--hf REFERENCE]
    python tools/convert_checkpoint.py inspect PATH [--tensors]
    python tools/convert_checkpoint.py verify A B

Exit codes: 0 done (verify: equal bit for bit); 1 verify found differences; 2 the command could not be carried out.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

# torch reads it as it is imported. Tensors in large pages: filling memory that is new is a third of a conversion's work.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from megatron_gcpo.cluster import platform as platforms
from megatron_gcpo.config.records import ClusterConfig
from megatron_gcpo.convert.work import Options

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SHOWN = 10
"""Differences that verify prints."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    platforms.install("cpu")  # before anything imports Megatron-Core, which says at length what a CPU lacks
    try:
        return arguments.run(arguments)
    except ValueError as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("convert_checkpoint: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    to_megatron = commands.add_parser("hf-to-megatron", help="a folder for model.start_from of a recipe")
    to_megatron.add_argument("source", help="Hugging Face folder")
    to_megatron.add_argument("target", help="folder to make")
    for flag, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert tensor")):
        to_megatron.add_argument(
            f"--{flag}", type=int, default=1, help=f"{what} parallel size to cut for (any other reads it too)"
        )
    to_megatron.add_argument("--vpp", type=int, help="virtual pipeline stages of each rank")
    to_megatron.add_argument(
        "--megatron",
        action="append",
        default=[],
        metavar="NAME=N",
        help="option of model.megatron that places layers, such as num_layers_in_first_pipeline_stage=3",
    )
    to_megatron.add_argument(
        "--leave-out",
        action="append",
        default=[],
        metavar="REGEX",
        help="tensors to convert without (next-token heads of DeepSeek-V3, ...)",
    )
    to_megatron.set_defaults(run=_to_megatron)

    to_hf = commands.add_parser("megatron-to-hf", help="a folder for transformers, vLLM and the hub")
    to_hf.add_argument("source", help="checkpoint, or the folder of a run (its newest checkpoint)")
    to_hf.add_argument("target", help="folder to make")
    to_hf.add_argument("--hf", metavar="REFERENCE", help="Hugging Face folder to take config and tokenizer from")
    to_hf.set_defaults(run=_to_hf)

    for command in (to_megatron, to_hf):
        command.add_argument("--dtype", choices=("fp32", "bf16"), help="cast weights (default: as they are)")
        command.add_argument(
            "--max-shard-bytes",
            type=_bytes,
            default=Options().max_shard_bytes,
            metavar="N[K|M|G]",
            help="length of files (default 2G)",
        )
        command.add_argument("--processes", type=int, default=1, help="files written at once")
        command.add_argument(
            "--overwrite", action="store_true", help="replace a target that exists, once the new one is whole"
        )
        command.add_argument("--no-progress", action="store_true")

    inspect = commands.add_parser("inspect", help="what a checkpoint is")
    inspect.add_argument("path")
    inspect.add_argument("--tensors", action="store_true", help="list them")
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser("verify", help="compare two checkpoints of any format tensor by tensor")
    verify.add_argument("a")
    verify.add_argument("b")
    verify.add_argument("--hf", metavar="REFERENCE", help="says which model a foreign torch_dist folder is of")
    verify.set_defaults(run=_verify)

    for command in (to_megatron, inspect, verify):
        command.add_argument(
            "--allow-pickle",
            action="store_true",
            help="open .bin files; a pickle from a stranger is a program from a stranger",
        )
    return parser


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 500M or 2G")
    return int(float(found[1]) * UNITS[found[2].upper()])


def _options(arguments: argparse.Namespace, **more: Any) -> Options:
    return Options(
        max_shard_bytes=arguments.max_shard_bytes,
        processes=arguments.processes,
        overwrite=arguments.overwrite,
        progress=not arguments.no_progress,
        **more,
    )


def _to_megatron(arguments: argparse.Namespace) -> int:
    from megatron_gcpo.convert import to_megatron

    tp, pp, ep, etp = arguments.tp, arguments.pp, arguments.ep, arguments.etp
    sizes = {
        "platform": "cpu",
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": arguments.vpp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "sequence_parallel": tp > 1,
        "processes_per_node": pp * tp * ep * etp,
    }
    target = to_megatron.convert(
        arguments.source,
        arguments.target,
        cluster=ClusterConfig.model_validate(sizes),
        megatron=dict(_number(text) for text in arguments.megatron),
        dtype=arguments.dtype,
        options=_options(arguments, allow_pickle=arguments.allow_pickle, leave_out=tuple(arguments.leave_out)),
    )
    print(f"{target} is written: set model.start_from to it and model.path to {arguments.source}")
    return 0


def _number(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if not value:
        raise ValueError(f"--megatron {text}: write NAME=VALUE")
    return name, int(value) if value.isdigit() else value


def _to_hf(arguments: argparse.Namespace) -> int:
    from megatron_gcpo.convert import to_hf

    target = to_hf.convert(
        arguments.source, arguments.target, reference=arguments.hf, dtype=arguments.dtype, options=_options(arguments)
    )
    print(f"{target} is written")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from megatron_gcpo.convert.describe import describe

    found = describe(arguments.path, allow_pickle=arguments.allow_pickle)
    types = ", ".join(f"{name} {count:,}" for name, count in found.dtypes.items())
    print(f"{found.path}: {found.format}, {found.model_type or 'model unknown'}")
    print(f"{found.num_parameters:,} parameters ({types}), {found.num_bytes / 1e9:.3f} GB in {found.num_files} file(s)")
    for note in found.notes:
        print(note)
    if arguments.tensors:
        for tensor in found.tensors:
            pieces = f"  {tensor.num_chunks} pieces" if tensor.num_chunks > 1 else ""
            print(f"  {tensor.name}  {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{pieces}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from megatron_gcpo.convert.compare import compare

    found = compare(arguments.a, arguments.b, reference=arguments.hf, allow_pickle=arguments.allow_pickle)
    for title, names in (("only in A", found.missing), ("only in B", found.extra)):
        for name in names[:SHOWN]:
            print(f"{title}: {name}")
        if len(names) > SHOWN:
            print(f"{title}: {len(names) - SHOWN} more")
    for difference in found.different[:SHOWN]:
        print(f"{difference.name}: {difference.detail}")
    if len(found.different) > SHOWN:
        print(f"{len(found.different) - SHOWN} more tensors differ")
    print(
        f"{found.num_equal} tensors equal bit for bit, {len(found.different)} different, {len(found.missing)} only in A, "
        f"{len(found.extra)} only in B; |A| {found.norm_a:.9g}, |B| {found.norm_b:.9g}, |A - B| {found.norm_difference:.3g}"
    )
    return 0 if found.equal else 1


if __name__ == "__main__":
    sys.exit(main())

"""Conversion against a plain copy of the same bytes and against megatron-bridge's own path, in one run.

    python tools/bench_convert.py [--gigabytes 4] [--processes 2] [--rounds 3] [--limit] [--no-bridge]

A synthetic dense bf16 checkpoint (Qwen3 architecture, several safetensors files) is written to --folder and converted to a
Megatron checkpoint and back. Every measurement ends with the bytes on the disk (fsync) and begins with the source in the
system's cache; copies and conversions alternate, and the medians are compared. The time to import the libraries is not
counted, the time to plan is. --limit: convert under a limit on private memory (RLIMIT_DATA) of the shard plus one layer
plus what the process holds before it begins.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as tools/convert_checkpoint.py does
import torch

HIDDEN, LAYERS_PER_GB, VOCABULARY = 2048, 10, 32_000
SLACK_BYTES = 96 << 20
"""For the interpreter: arenas, thread stacks, the records of files."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-shard-bytes", type=int, default=128 << 20)
    parser.add_argument("--limit", action="store_true", help="only show that the memory stays bounded")
    parser.add_argument("--no-bridge", action="store_true")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        root = Path(scratch)
        source = root / "source"
        write_source(source, config_of(arguments.gigabytes))
        import_everything()
        if arguments.limit:
            return under_limit(root, source, arguments)
        return compare(root, source, arguments)


def config_of(gigabytes: float, vocabulary: int = VOCABULARY) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=max(2, round(gigabytes * LAYERS_PER_GB)),
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    )


def write_source(path: Path, config: Any) -> None:
    """A checkpoint of this model; its values are noise, another part of it for each tensor."""
    from transformers import AutoModelForCausalLM

    from megatron_gcpo.convert.hf_writer import write_checkpoint

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    noise = torch.randn(max(shape.numel() for _, shape in shapes) + len(shapes), dtype=torch.bfloat16)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, shape) in enumerate(shapes):
            yield name, noise[number : number + shape.numel()].reshape(shape)

    write_checkpoint(path, tensors(), hf_config=config, max_shard_bytes=512 << 20)


def import_everything() -> None:
    from megatron_gcpo.cluster import platform as platforms

    platforms.import_megatron_bridge(platforms.install("cpu"))
    import megatron_gcpo.convert.to_hf
    import megatron_gcpo.convert.to_megatron  # noqa: F401


def compare(root: Path, source: Path, arguments: argparse.Namespace) -> int:
    megatron, back, copied = root / "megatron", root / "back", root / "copy"
    runs: dict[str, Callable[[], Any]] = {
        "plain copy": lambda: copy(source, copied),
        "Hugging Face -> Megatron": lambda: to_megatron(source, megatron, arguments),
        "Megatron -> Hugging Face": lambda: to_hf(megatron, back, arguments),
    }
    targets = dict(zip(runs, (copied, megatron, back), strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for target in targets.values():  # what one wrote shall not push the other's source out of the system's cache
            shutil.rmtree(target, ignore_errors=True)
        for name, run in runs.items():
            seconds[name].append(timed(run))
            if name == "plain copy":
                shutil.rmtree(copied)
    total = sum(file.stat().st_size for file in source.glob("*.safetensors")) / 1e9
    print(
        f"{total:.2f} GB, {arguments.processes} process(es), {arguments.rounds} rounds, medians (smallest - largest):"
    )
    plain = statistics.median(seconds["plain copy"])
    for name, times in seconds.items():
        middle = statistics.median(times)
        spread = f"{min(times):.2f} - {max(times):.2f} s"
        print(
            f"  {name:26s} {middle:6.2f} s ({spread}), {total / middle:.2f} GB/s, {plain / middle:.0%} of the copy's speed"
        )
    if not arguments.no_bridge:
        for name, taken in bridge(source, root).items():
            print(f"  {name:26s} {taken:6.2f} s, {total / taken:.2f} GB/s")
    return 0


def timed(run: Callable[[], Any]) -> float:
    os.sync()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def copy(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
        flush(target / file.name)


def flush(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def to_megatron(source: Path, target: Path, arguments: argparse.Namespace) -> None:
    from megatron_gcpo.convert import to_megatron as direction

    direction.convert(source, target, options=options_of(arguments))


def to_hf(source: Path, target: Path, arguments: argparse.Namespace) -> None:
    from megatron_gcpo.convert import to_hf as direction

    direction.convert(source, target, options=options_of(arguments))


def options_of(arguments: argparse.Namespace) -> Any:
    from megatron_gcpo.convert.work import Options

    return Options(max_shard_bytes=arguments.max_shard_bytes, processes=arguments.processes)


def bridge(source: Path, root: Path) -> dict[str, float]:
    """The same two ways through a model in memory: the bridge's load and Megatron's save; the bridge's export in shards.

    The bridge's own save_hf_weights needs a package more; what it does besides gathering is safetensors' save_file.
    """
    from megatron.core import dist_checkpointing

    from megatron_gcpo.cluster import platform as platforms
    from megatron_gcpo.cluster import topology as topologies
    from megatron_gcpo.config.records import ClusterConfig, ModelConfig
    from megatron_gcpo.policy.build import build, prints_to_log
    from megatron_gcpo.policy.weights import model_state, put_weights

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    platform, cluster = platforms.install("cpu"), ClusterConfig(platform="cpu")
    topology = topologies.init(cluster, platform)
    try:
        begin = time.perf_counter()
        policy = build(ModelConfig(path=str(source), dtype="bf16"), cluster, platform)
        saved = root / "bridge_megatron"
        saved.mkdir()
        dist_checkpointing.save(model_state(policy), str(saved))
        for file in saved.iterdir():
            flush(file)
        stored = time.perf_counter()
        read: Any = dist_checkpointing.load(model_state(policy), str(saved))
        put_weights(policy, read)
        loaded = time.perf_counter()
        with prints_to_log():
            export(policy, root / "bridge_back")
        return {
            "bridge load, Megatron save": stored - begin,
            "Megatron load, bridge export": time.perf_counter() - stored,
            "  of which the export": time.perf_counter() - loaded,
        }
    finally:
        topology.close()


def export(policy: Any, target: Path) -> None:
    from safetensors.torch import save_file

    target.mkdir()
    shard: dict[str, torch.Tensor] = {}
    count = 0
    for name, tensor in policy.bridge.export_hf_weights(policy.chunks, cpu=True, show_progress=False):
        shard[name] = tensor.contiguous()
        if sum(t.nbytes for t in shard.values()) > 512 << 20:
            save_file(shard, target / f"{count}.safetensors")
            flush(target / f"{count}.safetensors")
            shard, count = {}, count + 1
    if shard:
        save_file(shard, target / f"{count}.safetensors")
        flush(target / f"{count}.safetensors")


def under_limit(root: Path, source: Path, arguments: argparse.Namespace) -> int:
    """Both directions in processes that may not allocate more than a shard and a layer."""
    total = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    layer = largest_unit(source)
    extra = arguments.max_shard_bytes + 3 * layer + SLACK_BYTES
    limit = private_bytes() + extra
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    to_megatron(source, root / "megatron", arguments)
    to_hf(root / "megatron", root / "back", arguments)
    print(
        f"{total / 1e9:.2f} GB both ways under {extra / 1e9:.2f} GB of private memory more than at the "
        f"start, {arguments.processes} process(es), shards of {arguments.max_shard_bytes / 1e9:.2f} GB, largest parameter "
        f"{layer / 1e9:.3f} GB"
    )
    try:
        torch.empty(total, dtype=torch.uint8).fill_(1)
    except (RuntimeError, MemoryError):
        print("the whole checkpoint does not fit under that limit")
        return 0
    print("the limit is wider than the checkpoint: choose more --gigabytes")
    return 1


def largest_unit(source: Path) -> int:
    from megatron_gcpo.convert.hf_folder import open_folder

    return 2 * max(entry.num_bytes for entry in open_folder(source).entries.values())


def private_bytes() -> int:
    """What this process has allocated, as RLIMIT_DATA counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


if __name__ == "__main__":
    sys.exit(main())

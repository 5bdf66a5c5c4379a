"""Pushes of one model from a TP2 x PP2 trainer into a TP2 vLLM engine: sharded, and by way of whole tensors.

    OMP_NUM_THREADS=1 python -m tools.bench_reshard [--size 1.0] [--rounds 3] [--engine-tp 2]

Gather-and-convert is the bridge's own export, every rank receiving every tensor, loaded into the engine as it comes. Both
ways end in the same engine, through vLLM's layerwise reload; fingerprints are on in both unless --no-fingerprint. The copy
of the same bytes is a plain one within a process. Best of the rounds, wall-clock, all on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_gcpo.cluster import launch, platform, topology
from megatron_gcpo.config.records import ClusterConfig, ModelConfig, PushConfig, RolloutConfig

HIDDEN, INNER, VOCABULARY = 2048, 5632, 32_000
CLUSTER: dict[str, Any] = {
    "platform": "cpu",
    "processes_per_node": 4,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1.0, help="of the model in GB, bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine-tp", type=int, default=2)
    parser.add_argument("--bucket-mib", type=int, default=128)
    parser.add_argument("--no-fingerprint", action="store_true")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        return launch.run_worker(lambda: measure(args, Path(args.rank_of)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(args.size, folder / "model")
        argv = [*sys.argv[1:], "--rank-of", str(folder)]
        code = launch.run(ClusterConfig(**CLUSTER), argv, log_dir=folder / "logs", module="tools.bench_reshard")
        if code:
            return code
        print(report(json.loads((folder / "result.json").read_text())))
    return 0


def write_checkpoint(size_gb: float, folder: Path) -> None:
    """Random weights of a Qwen3 model of about this size."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    per_layer = HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 2 + 3 * INNER)
    embeddings = 2 * VOCABULARY * HIDDEN
    layers = max(2, round((size_gb * 1e9 / 2 - embeddings) / per_layer / 2) * 2)
    config = Qwen3Config(
        vocab_size=VOCABULARY if size_gb >= 0.5 else 4_000,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(default)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a push asks of a trainer that has no optimizer."""

    policy: Any

    def gather_parameters(self) -> None:
        pass

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        from megatron_gcpo.reshard.gather import export_hf

        return export_hf(self.policy)


def measure(args: argparse.Namespace, folder: Path) -> int:
    cpu = platform.install("cpu")
    cluster = ClusterConfig(**CLUSTER)
    place = topology.init(cluster, cpu)
    from megatron_gcpo.policy.build import build
    from megatron_gcpo.reshard.pusher import Pusher

    policy = build(ModelConfig(path=str(folder / "model"), dtype="bf16"), cluster, cpu)
    weights = Weights(policy=policy)
    engine = make_engine(args, policy.hf_config) if place.is_leader else None
    place.broadcast_object()  # the others wait for the engine
    result: dict[str, Any] = {}
    for mode in ("sharded", "full"):
        config = PushConfig(mode=mode, bucket_bytes=args.bucket_mib << 20, fingerprint=not args.no_fingerprint)
        pusher = Pusher(weights, place, config, folder)
        stats = [pusher.push(engine) for _ in range(args.rounds + 1)]  # the first one plans and connects
        best = min(stats[1:], key=lambda s: s.seconds)
        result[mode] = {"seconds": best.seconds, "bytes": best.num_bytes, "phases": dict(best.phases)}
        result[mode]["first"] = stats[0].seconds
        if best.minimal_bytes:
            result["minimal_bytes"] = best.minimal_bytes
        pusher.close()
    result["export"] = best_of(args.rounds, lambda: sum(t.numel() for _, t in weights.export()))
    if place.is_leader:
        result["copy"] = copy_seconds(result["minimal_bytes"], args.rounds)
        (folder / "result.json").write_text(json.dumps(result))
    place.broadcast_object()
    place.close()
    if engine is not None:
        engine.close()
    return 0


def make_engine(args: argparse.Namespace, hf_config: Any) -> Any:
    from megatron_gcpo.rollout.vllm.inprocess import VllmEngine

    rollout = RolloutConfig.model_validate(
        {
            "engine": "vllm",
            "vllm": {"tensor_parallel_size": args.engine_tp, "kv_cache_gib": 0.0625},
            "push": {"bucket_bytes": args.bucket_mib << 20, "fingerprint": not args.no_fingerprint},
        }
    )
    return VllmEngine(hf_config, rollout, dtype="bf16", max_positions=128, cpu=True)


def best_of(rounds: int, run: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.monotonic()
        run()
        seconds.append(time.monotonic() - start)
    return min(seconds)


def copy_seconds(num_bytes: int, rounds: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return best_of(rounds, lambda: target.copy_(source))


def report(result: dict[str, Any]) -> str:
    sharded, full, least = result["sharded"], result["full"], result["minimal_bytes"]
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in sharded["phases"].items())
    lines = [
        f"needed by the engine's workers      {least / 1e9:6.2f} GB",
        f"sharded push                        {sharded['bytes'] / least:6.2f} x the bytes  {sharded['seconds']:6.2f} s"
        f"   ({phases}; the first one {sharded['first']:.2f} s)",
        f"gather-and-convert, whole tensors   {full['bytes'] / least:6.2f} x the bytes  {full['seconds']:6.2f} s",
        f"the bridge's export alone           {'':6s}             {result['export']:6.2f} s",
        f"a copy of the same bytes            {'':6s}             {result['copy']:6.2f} s",
        f"sharded is {full['seconds'] / sharded['seconds']:.1f} times as fast as gather-and-convert and takes "
        f"{sharded['seconds'] / result['copy']:.1f} times as long as a copy",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

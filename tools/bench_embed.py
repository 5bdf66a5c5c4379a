"""Throughput of the run's encoder against sentence-transformers' own encode, on the same texts.

    OMP_NUM_THREADS=1 python tools/bench_embed.py [--encoder minilm] [--texts 192] [--rounds 3]

Both sides run in turns; the best round of each counts, in CPU seconds on a CPU (other processes do not disturb them) and
in wall seconds on a GPU. The cache is off. The last line of a block is the encoder in bfloat16, for comparison.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial

import torch

from megatron_gcpo.config.records import EmbedConfig
from megatron_gcpo.data.tasks import TASKS
from megatron_gcpo.embed import Encoder, embedded_span
from megatron_gcpo.embed.sentence_model import load_model


def quick_start_texts(count: int) -> list[str]:
    """Distinct correct completions of the addition task, answers stripped: about 33 tokens each."""
    task, rng = TASKS["addition"](), random.Random(0)
    texts: dict[str, None] = {}
    for problem in rng.sample(task.problems(), count):
        texts |= {embedded_span(text, "reasoning"): None for _, text in task.solutions(problem)}
        if len(texts) >= count:
            break
    return list(texts)[:count]


def long_texts(count: int) -> list[str]:
    """Chains of such completions, from one to sixteen: lengths as uneven as those of a language model."""
    short, rng = quick_start_texts(256), random.Random(1)
    return [" ".join(rng.choices(short, k=rng.randint(1, 16))) for _ in range(count)]


def best_seconds(
    sides: dict[str, Callable[[], torch.Tensor]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds + 1):  # the first round warms up, and costs nothing to count
        for name, encode in sides.items():
            start = clock()
            encode()
            best[name] = min(best[name], clock() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--texts", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=EmbedConfig().batch_size)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device = torch.device(args.device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    configs = {
        dtype: EmbedConfig(encoder=args.encoder, dtype=dtype, batch_size=args.batch_size, cache_entries=0)
        for dtype in ("fp32", "bf16")
    }
    encoders = {dtype: Encoder(config, device) for dtype, config in configs.items()}
    reference = load_model(args.encoder, device)

    for title, texts in {"quick start": quick_start_texts(args.texts), "long": long_texts(args.texts // 4)}.items():

        def encode(texts: list[str] = texts) -> torch.Tensor:
            return torch.tensor(
                reference.encode(texts, batch_size=args.batch_size, normalize_embeddings=True, show_progress_bar=False)
            )

        sides: dict[str, Callable[[], torch.Tensor]] = {"sentence-transformers encode": encode}
        sides |= {f"this encoder {dtype}": partial(encoder.encode, texts) for dtype, encoder in encoders.items()}
        seconds = best_seconds(sides, args.rounds, clock)
        expected = encode()
        base = seconds["sentence-transformers encode"]
        print(f"{title}: {len(texts)} texts, {torch.get_num_threads()} thread(s), {device}")
        for name, side in sides.items():
            cosine = float((side() * expected).sum(-1).min())
            rate = len(texts) / seconds[name]
            print(f"  {name:30s} {rate:8.1f} texts/s   {base / seconds[name]:5.2f}x   least cosine {cosine:.6f}")


if __name__ == "__main__":
    main()

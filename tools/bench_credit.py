"""How fast the cooperative credit is, and how much faster than enumerating determinants. One thread, no GPU.

    python tools/bench_credit.py [--repeats 20]

Every time is the best of several calls and covers the complete Shapley computation, from embeddings and rewards to
credits. The baseline builds I + L_S for all 2^K coalitions, takes a batched ``torch.linalg.slogdet`` of each chunk, and
sums with the textbook weights |S|! (K - |S| - 1)! / K!.
"""

from __future__ import annotations

import argparse
import math
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import torch

from megatron_gcpo.credit import gcpo_advantages, shapley_values, team_credit

C = 10.0
EMBEDDING_SIZE = 384
CHUNK = 1 << 14


def enumerate_determinants(embeddings_KD: torch.Tensor) -> torch.Tensor:
    """[K] Shapley values of log det(I + L_S) by one determinant for each coalition; rewards are all 1."""
    k = len(embeddings_KD)
    kernel_KK = C * embeddings_KD @ embeddings_KD.T
    fact = [math.factorial(n) for n in range(k + 1)]
    joining = torch.tensor([0.0] + [fact[s - 1] * fact[k - s] / fact[k] for s in range(1, k + 1)], dtype=torch.float64)
    staying = torch.tensor([fact[s] * fact[k - s - 1] / fact[k] for s in range(k)] + [0.0], dtype=torch.float64)
    phi_K = torch.zeros(k, dtype=torch.float64)
    for start in range(0, 1 << k, CHUNK):
        index = torch.arange(start, min(start + CHUNK, 1 << k))
        inside_CK = (index[:, None] >> torch.arange(k)) & 1
        masks_CK = inside_CK.double()
        matrices = torch.eye(k, dtype=torch.float64) + masks_CK[:, :, None] * masks_CK[:, None, :] * kernel_KK
        values_C = torch.linalg.slogdet(matrices).logabsdet
        size_C = inside_CK.sum(1)
        phi_K += (values_C * joining[size_C]) @ masks_CK - (values_C * staying[size_C]) @ (1 - masks_CK)
    return phi_K


def unit_rows(k: int, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(k, EMBEDDING_SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 1
    return torch.nn.functional.normalize(rows, dim=1)


def best_s(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def compare(k: int, repeats: int, wanted: float | None) -> str:
    rows_KD, ones_K = unit_rows(k), torch.ones(k, dtype=torch.float64)
    # Interleaved, so that a busy moment of the machine hits both.
    ours_s, baseline_s = math.inf, math.inf
    for _ in range(3):
        ours_s = min(ours_s, best_s(lambda: shapley_values(rows_KD, ones_K, c=C), repeats))
        baseline_s = min(baseline_s, best_s(lambda: enumerate_determinants(rows_KD), 2))
    gap = (torch.as_tensor(shapley_values(rows_KD, ones_K, c=C)) - enumerate_determinants(rows_KD)).abs().max()
    goal = "" if wanted is None else f"  (goal {wanted:.0f}x)"
    return f"{k:4d} {1e3 * ours_s:10.3f} {1e3 * baseline_s:12.2f} {baseline_s / ours_s:8.0f}x {gap:12.1e}{goal}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="calls of which the fastest counts")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)

    print("exact Shapley values, log det, one group (milliseconds)")
    print(f"{'K':>4} {'ours':>10} {'enumeration':>12} {'ratio':>9} {'difference':>12}")
    for k, wanted in ((4, None), (8, None), (12, 20.0), (14, None), (16, 50.0)):
        print(compare(k, repeats, wanted), flush=True)

    rows_KD = unit_rows(20).numpy()
    seconds = best_s(lambda: shapley_values(rows_KD, np.ones(20), c=C), 3)
    tracemalloc.start()
    shapley_values(rows_KD, np.ones(20), c=C)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"\nK = 20: {1e3 * seconds:.0f} ms, peak memory {peak / 2**20:.0f} MiB")

    groups = [(unit_rows(16, seed=g).numpy(), np.ones(16)) for g in range(64)]
    seconds = best_s(lambda: [gcpo_advantages(*group, c=C) for group in groups], 3)
    print(f"64 groups of 16, all right, to advantages: {seconds:.3f} s  (goal 2 s)")

    rows_KD = unit_rows(16).numpy()
    seconds = best_s(lambda: shapley_values(rows_KD, np.ones(16), c=C, value="det"), repeats)
    print(f"value=det, K = 16: {1e3 * seconds:.3f} ms")
    rows_KD = unit_rows(64).numpy()
    seconds = best_s(lambda: shapley_values(rows_KD, np.ones(64), c=C), 2)
    estimate = team_credit(rows_KD, np.ones(64), c=C)
    error = estimate.stderr_G.max() / estimate.credits_G.mean()
    print(f"sampled, K = 64, 512 permutations: {1e3 * seconds:.0f} ms, standard error {100 * error:.2f} % of a credit")


if __name__ == "__main__":
    main()

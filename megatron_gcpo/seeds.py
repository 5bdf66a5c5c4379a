"""Every random stream of a run, derived by hashing from what the stream is for.

A stream is named by (run seed, stream name, step, prompt id, sample index) and by nothing else: not by the rank that
draws from it, not by the order of the calls, not by what was drawn before. The same run therefore draws the same
numbers on another number of replicas and after a resume, and two samples of one prompt never share a seed.

Stream names in use: the caller's file or stage, e.g. "rollout", "evaluate", "shapley", "data.epoch". A new use takes a
new name; reusing one would correlate two things that must be independent.

The derivation is part of the reproducibility contract (golden values in the tests): blake2b over length-prefixed
fields, cut to 63 bits so that the result is a valid seed for torch, numpy, Python and signed 64-bit columns alike.
Among n seeds the chance of any collision is about n^2 / 2^64: 5e-8 for a million of them.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np

SEED_BITS = 63


def derive_seed(run_seed: int, stream: str, step: int = 0, prompt_id: str = "", sample: int = 0) -> int:
    """The seed of one stream, in [0, 2^63).

    Args:
        run_seed: ``run.seed``; any int.
        stream: what the numbers are for; see the module's list.
        step: training step, epoch or position, whatever the stream counts; any int.
        prompt_id: ``Prompt.id``, or "" for streams that belong to no prompt.
        sample: index of the rollout in its group; any int.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"gcpo.seeds")
    for part in (str(run_seed), stream, str(step), prompt_id, str(sample)):
        # surrogatepass: ids come from users' files and JSON can spell lone surrogates
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return int.from_bytes(digest.digest(), "little") >> (64 - SEED_BITS)


def permutation(size: int, seed: int) -> np.ndarray:
    """[size] int64, a permutation of range(size) that depends on (size, seed) alone.

    Ranks of splitmix64 outputs (a bijection of the counter, hence no ties), so that the order does not change with the
    version of numpy or Python, whose own shuffles promise no stability. The i-th key does not depend on ``size``.
    """
    return np.argsort(_keys(size, seed), kind="stable").astype(np.int64)


def uniforms(size: int, seed: int) -> np.ndarray:
    """[size] float64 in [0, 1) that depend on (place, seed) alone."""
    return (_keys(size, seed) >> np.uint64(11)).astype(np.float64) / 2**53


def _keys(size: int, seed: int) -> np.ndarray:
    """[size] uint64, the i-th output of splitmix64 from this seed."""
    with np.errstate(over="ignore"):
        keys = np.uint64(seed) + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return keys ^ (keys >> np.uint64(31))


def unit(seed: int) -> float:
    """The number in [0, 1) that a derived seed stands for: one uniform draw without a generator."""
    return (seed >> (SEED_BITS - 53)) / 2**53


def seed_libraries(run_seed: int) -> None:
    """Seed the global generators of Python and numpy: nothing of ours draws from them, other libraries may.

    torch's belong to Megatron, which seeds them by rank.
    """
    random.seed(derive_seed(run_seed, "libraries.python"))
    np.random.seed(derive_seed(run_seed, "libraries.numpy") % 2**32)

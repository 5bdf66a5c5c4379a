"""Two checkpoints of any format, tensor by tensor: what one lacks, what differs and by how much."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PretrainedConfig

from megatron_gcpo.cluster import platform as platforms
from megatron_gcpo.convert import hf_folder, megatron_folder
from megatron_gcpo.convert.hf_folder import HfFolder
from megatron_gcpo.convert.megatron_folder import HfView, MegatronFolder
from megatron_gcpo.convert.skeleton import Skeleton, open_skeleton
from megatron_gcpo.convert.torch_dist import is_torch_dist

BLOCK = 1 << 22
"""Elements whose differences are held in fp64 at once."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor that is not the same in both."""

    name: str
    what: str
    """"dtype", "shape" or "values"."""
    detail: str
    """For a reader."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    num_equal: int
    """Tensors equal bit for bit."""
    missing: tuple[str, ...]
    """In a and not in b."""
    extra: tuple[str, ...]
    """In b and not in a."""
    different: tuple[Difference, ...]
    norm_a: float
    """Euclidean, over all tensors that both have."""
    norm_b: float
    norm_difference: float
    """Of a - b, over the tensors of one shape."""

    @property
    def equal(self) -> bool:
        return not (self.missing or self.extra or self.different)


@dataclass(kw_only=True)
class _Sums:
    a: float = 0.0
    b: float = 0.0
    difference: float = 0.0
    num_equal: int = 0
    different: list[Difference] = field(default_factory=list)


def compare(
    a: str | Path,
    b: str | Path,
    *,
    reference: str | Path | None = None,
    allow_pickle: bool = False,
    show: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """Compare by Hugging Face names; holds a few tensors at a time. show(name): before each tensor.

    reference: a Hugging Face folder that says which model a foreign torch_dist folder is of.

    Raises ValueError when one of them cannot be read, naming file and tensor.
    """
    first, second = _open(Path(a), reference, allow_pickle), _open(Path(b), reference, allow_pickle)
    with _skeleton_for(first, second) as skeleton:
        source, other = _Source(first, skeleton), _Source(second, skeleton)
        if skeleton is not None:
            skeleton.hold_on_cpu()
        sums = _Sums()
        for name, tensor in source.all():
            if name in other.names:
                show(name)
                _compare(name, tensor, other.read(name), sums)
    return Comparison(
        num_equal=sums.num_equal,
        missing=tuple(sorted(source.names - other.names)),
        extra=tuple(sorted(other.names - source.names)),
        different=tuple(sums.different),
        norm_a=math.sqrt(sums.a),
        norm_b=math.sqrt(sums.b),
        norm_difference=math.sqrt(sums.difference),
    )


def _open(path: Path, reference: str | Path | None, allow_pickle: bool) -> HfFolder | MegatronFolder:
    if path.is_dir() and not is_torch_dist(path) and hf_folder.holds_weights(path):
        return hf_folder.open_folder(path, allow_pickle=allow_pickle)
    return megatron_folder.open_folder(path, reference)


@contextlib.contextmanager
def _skeleton_for(first: HfFolder | MegatronFolder, second: HfFolder | MegatronFolder) -> Iterator[Skeleton | None]:
    configs: list[PretrainedConfig] = [f.config for f in (first, second) if isinstance(f, MegatronFolder)]
    if not configs:
        yield None
        return
    with open_skeleton(configs[0], platforms.install("cpu")) as skeleton:
        yield skeleton


class _Source:
    """One side, by Hugging Face names."""

    def __init__(self, folder: HfFolder | MegatronFolder, skeleton: Skeleton | None) -> None:
        self._folder = folder
        self._last: Tensors = {}
        if isinstance(folder, HfFolder):
            self.names = set(folder.entries)
            return
        assert skeleton is not None, "got no skeleton, expected one for a Megatron folder"
        self._view = HfView(folder=folder, skeleton=skeleton)
        self._view.check()
        self._units = {spec.name: unit for unit in skeleton.units for spec in self._view.specs(unit)}
        self.names = set(self._units) | set(folder.tied)

    def all(self) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(self._folder, HfFolder):
            entries = self._folder.entries
            names = sorted(self.names, key=lambda n: (str(entries[n].file), entries[n].begin))
            yield from ((name, self.read(name)) for name in names)
            return
        for name in (*self._units, *self._folder.tied):
            yield name, self.read(name)

    def read(self, name: str) -> torch.Tensor:
        if isinstance(self._folder, HfFolder):
            return self._folder.read(name)
        name = self._folder.tied.get(name, name)
        if name not in self._last:
            # The other tensors of a unit are asked for next.
            self._last = self._view.tensors(self._units[name])
        return self._last[name]


def _compare(name: str, a: torch.Tensor, b: torch.Tensor, sums: _Sums) -> None:
    sums.a += _squares(a)
    sums.b += _squares(b)
    if a.shape != b.shape:
        sums.different.append(Difference(name=name, what="shape", detail=f"{list(a.shape)} and {list(b.shape)}"))
        return
    if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
        sums.num_equal += 1
        return
    squares, largest, where, count = _distance(a.reshape(-1), b.reshape(-1))
    sums.difference += squares
    types = "" if a.dtype == b.dtype else f"{_short(a.dtype)} and {_short(b.dtype)}; "
    place = [int(n) for n in torch.unravel_index(torch.tensor(where), a.shape)] if count else []
    values = (
        f"{count} of {a.numel()} elements differ, first at {place} ({a.reshape(-1)[where].item():.7g} and "
        f"{b.reshape(-1)[where].item():.7g}), by at most {largest:.3g}; |a| {math.sqrt(_squares(a)):.6g}, "
        f"|b| {math.sqrt(_squares(b)):.6g}, |a - b| {math.sqrt(squares):.3g}"
        if count
        else "the values are equal" + (", zeros differ in sign" if a.dtype == b.dtype else "")
    )
    sums.different.append(Difference(name=name, what="values" if count else "dtype", detail=types + values))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _squares(tensor: torch.Tensor) -> float:
    return sum(float(block.double().square().sum()) for block in tensor.reshape(-1).split(BLOCK))


def _distance(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, int, int]:
    """(sum of squared differences, largest, position of the first, how many)."""
    squares, largest, first, count = 0.0, 0.0, -1, 0
    for number, (x, y) in enumerate(zip(a.split(BLOCK), b.split(BLOCK), strict=True)):
        gap = (x.double() - y.double()).abs()
        differs = gap != 0
        squares += float(gap.square().sum())
        largest = max(largest, float(gap.max()))
        found = int(differs.sum())
        if found and first < 0:
            first = number * BLOCK + int(differs.nonzero()[0])
        count += found
    return squares, largest, first, count


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

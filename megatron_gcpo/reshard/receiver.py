"""The receiving end of a push, in each process that holds a part of the engine's weights.

It takes buckets of bytes, puts the pieces of each tensor together behind a window, and gives the window to the model's own
weight loader as soon as all pieces of it are there. Fingerprints are taken of what was sent where whole tensors come, and
where parts come of what lies in the parameters after the copy.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_gcpo.reshard import boxes
from megatron_gcpo.reshard.boxes import Box
from megatron_gcpo.reshard.fingerprint import add, fingerprint
from megatron_gcpo.reshard.window import Window
from megatron_gcpo.reshard.wire import Piece, TensorSpec

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""The model's own load_weights."""


@dataclass(eq=False)
class Arriving:
    """A tensor on its way: the origin behind the window that the model's loader gets."""

    spec: TensorSpec
    expected: int
    """Elements that this process is sent."""
    landed: dict[Box, int] | None
    """Fingerprints of what lies in parameters after the copies; None: do not look."""
    held: list[tuple[Box, torch.Tensor]] = field(default_factory=list)
    num_owned: int = 0
    """How many of ``held`` do not point into a bucket any more."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def copy_box(self, target: torch.Tensor, box: Box) -> None:
        if target.is_meta:  # vLLM counts what a loader is going to load
            return
        found = self._gather(target, box)
        if found != boxes.volume(box):
            raise ValueError(f"the model wants {box} of {self.name!r}, of which only {found} elements were sent")
        if self.landed is not None:
            seen = target if target.dtype == self.spec.dtype else target.to(self.spec.dtype)
            # By box: some parameters (biases) are filled twice in vLLM's reload, when it counts and when it loads.
            self.landed[box] = fingerprint(seen, box, self.shape, self.spec.word_bytes)

    def assembled(self) -> torch.Tensor:
        """The whole tensor, in memory of its own."""
        box, data = boxes.whole(self.shape), self.held[0][1]
        tensor = torch.empty(self.shape, dtype=data.dtype, device=data.device)
        self._gather(tensor, box)
        return tensor

    def own(self) -> None:
        """Stop pointing into the bucket, which is about to be filled again."""
        self.held[self.num_owned :] = [(box, data.clone()) for box, data in self.held[self.num_owned :]]
        self.num_owned = len(self.held)

    def _gather(self, target: torch.Tensor, box: Box) -> int:
        found = 0
        for held, data in self.held:
            common = boxes.intersect(held, box)
            if common is not None:
                boxes.part(target, box, common).copy_(boxes.part(data, held, common))
                found += boxes.volume(common)
        return found


class Receiver:
    """One push after the other into one model."""

    def __init__(self, load: Load, device: torch.device) -> None:
        self.load = load
        self.device = device
        self.begin(whole=True, verify=False)

    def begin(self, *, whole: bool, verify: bool) -> None:
        """Forget what came before.

        whole: every process is sent whole tensors, which the model's loader gets as they are; else only what the process
            needs, behind windows.
        verify: take fingerprints.
        """
        self.whole, self.verify = whole, verify
        self.waiting: dict[str, Arriving] = {}
        self.given: list[weakref.ref[Arriving]] = []
        self.arrived: dict[str, int] = {}
        self.landed: dict[str, dict[Box, int]] = {}
        self.num_buckets = 0

    def receive(self, specs: Sequence[TensorSpec], pieces: Sequence[Piece], data: torch.Tensor) -> None:
        """One bucket; ``data``, uint8, may be written again as soon as this returns."""
        for piece in pieces:
            spec = specs[piece.tensor]
            raw = data[piece.offset : piece.offset + piece.num_bytes(spec)]
            self._hold(spec, piece, raw.view(spec.dtype).view(boxes.sizes(piece.box)))
        self._load_complete()
        # What a loader keeps for later (a layer of which more is to come) is all that must be copied out of the bucket.
        kept = [arriving for ref in self.given if (arriving := ref()) is not None]
        for arriving in (*kept, *self.waiting.values()):
            arriving.own()
        self.given = [weakref.ref(arriving) for arriving in kept]
        self.num_buckets += 1

    def report(self) -> dict[str, Any]:
        """JSON values: what came. ``marks``: fingerprint by tensor of all that was sent (whole) or landed (parts)."""
        return {
            "num_buckets": self.num_buckets,
            "incomplete": sorted(self.waiting),
            "marks": self.arrived if self.whole else self._landed_marks(),
        }

    def _landed_marks(self) -> dict[str, int]:
        return {name: functools.reduce(add, by_box.values()) for name, by_box in self.landed.items() if by_box}

    def _hold(self, spec: TensorSpec, piece: Piece, tensor: torch.Tensor) -> None:
        if self.verify and self.whole:
            mark = fingerprint(tensor, piece.box, spec.shape, spec.word_bytes)
            self.arrived[spec.name] = add(self.arrived.get(spec.name, 0), mark)
        arriving = self.waiting.get(spec.name)
        if arriving is None:
            landed = self.landed.setdefault(spec.name, {}) if self.verify and not self.whole else None
            arriving = Arriving(spec=spec, expected=piece.of_elements, landed=landed)
            self.waiting[spec.name] = arriving
        arriving.held.append((piece.box, tensor))

    def _load_complete(self) -> None:
        ready = [a for a in self.waiting.values() if sum(boxes.volume(box) for box, _ in a.held) == a.expected]
        for arriving in ready:
            del self.waiting[arriving.name]
        self.given += [weakref.ref(arriving) for arriving in ready]
        if ready:
            self.load([(arriving.name, self._stand_in(arriving)) for arriving in ready])

    def _stand_in(self, arriving: Arriving) -> torch.Tensor:
        if self.whole:
            return arriving.assembled()
        return Window.of(arriving, arriving.spec.dtype, self.device)

"""Whole tensors, one after the other, to every worker of an engine: the mode that needs to know nothing of the engine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_gcpo.config.records import PushConfig
from megatron_gcpo.reshard import boxes
from megatron_gcpo.reshard.adapters import AdapterPush, split
from megatron_gcpo.reshard.boxes import Box
from megatron_gcpo.reshard.channel import Channel
from megatron_gcpo.reshard.cuts import aligned, capacity, cut
from megatron_gcpo.reshard.fingerprint import dtype_name, fingerprint, word_bytes
from megatron_gcpo.reshard.stats import PushStats
from megatron_gcpo.reshard.transport import Section
from megatron_gcpo.reshard.wire import Piece, TensorSpec
from megatron_gcpo.rollout.engine import WeightControl


def deliver(
    control: WeightControl,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    version: int,
    push: PushConfig | None = None,
    device: torch.device | None = None,
    folder: Path | None = None,
    adapters: AdapterPush | None = None,
) -> PushStats:
    """Give all workers a complete set of weights; they hold it as this version when this returns.

    Args:
        weights: (Hugging Face name, whole tensor), each valid until the next is asked for.
        push: buckets, transport, fingerprints; its mode does not matter here.
        device: where the buckets lie; default: CPU.
        folder: for transport file.
        adapters: among ``weights`` are adapters, or they are nothing else; None: no adapter is in force afterwards.

    Raises:
        ValueError: a tensor is repeated or missing, or not what was sent, or a worker failed. The workers have been
            cleared and hold a mixture, which must not be served.
    """
    start_s = time.monotonic()
    push = push or PushConfig()
    with tempfile.TemporaryDirectory() as scratch:
        channel = Channel.open(
            control,
            push,
            device=device or torch.device("cpu"),
            folder=folder or Path(scratch),
            bucket_bytes=capacity(push.bucket_bytes),
        )
        stream = _Stream(channel=channel, bucket_bytes=capacity(push.bucket_bytes))
        try:
            channel.outlet.connected()
            channel.begin(whole=True, upon=adapters.base if adapters is not None and adapters.alone else None)
            try:
                for name, tensor in weights:
                    stream.add(name, tensor)
                stream.flush()
                channel.compare(dict.fromkeys(channel.workers, stream.marks))
                if adapters is None or not adapters.alone:
                    _require_all_fed(control, split(stream.tensors)[0])
                control.finish_weight_update(version)
                if adapters is not None:  # after the end of the update, with which vLLM drops all adapters
                    adopted = {"base": adapters.base, "rank": adapters.rank, "alpha": adapters.alpha}
                    control.rpc("gcpo_adopt", adopted)
            except BaseException:
                channel.abandon()
                raise
        finally:
            channel.close()
    return PushStats(
        mode="full" if adapters is None or not adapters.alone else "adapters",
        transport=channel.transport,
        num_tensors=len(stream.tensors),
        num_bytes=stream.num_bytes * len(channel.workers),
        minimal_bytes=None,
        seconds=time.monotonic() - start_s,
    )


@dataclass(kw_only=True)
class _Stream:
    """Packs tensors into buckets."""

    channel: Channel
    bucket_bytes: int
    marks: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, list[Any]] = field(default_factory=dict)
    """[name, shape, dtype] by name."""
    num_bytes: int = 0
    _buffer: torch.Tensor | None = None
    _used: int = 0
    _specs: list[TensorSpec] = field(default_factory=list)
    _pieces: list[Piece] = field(default_factory=list)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.tensors:
            raise ValueError(f"{name!r} was sent twice")
        shape = tuple(tensor.shape)
        self.tensors[name] = [name, list(shape), dtype_name(tensor.dtype)]
        word = word_bytes(tensor.element_size(), shape[-1:])
        spec = TensorSpec(name=name, shape=shape, dtype=tensor.dtype, word_bytes=word)
        if self.channel.verify:
            self.marks[name] = fingerprint(tensor, boxes.whole(shape), shape, word)
        for box in cut(boxes.whole(shape), self.bucket_bytes // tensor.element_size()):
            self._put(spec, box, tensor)

    def flush(self) -> None:
        if not self._pieces:
            return
        extra = {
            "tensors": [spec.to_json() for spec in self._specs],
            "pieces": [piece.to_json() for piece in self._pieces],
        }
        self.channel.send(dict.fromkeys(self.channel.workers, Section(0, self._used)), extra)
        self.num_bytes += sum(p.num_bytes(self._specs[p.tensor]) for p in self._pieces)
        self._buffer, self._used, self._specs, self._pieces = None, 0, [], []

    def _put(self, spec: TensorSpec, box: Box, tensor: torch.Tensor) -> None:
        num_bytes = boxes.volume(box) * spec.dtype.itemsize
        if self._buffer is not None and aligned(self._used) + num_bytes > self.bucket_bytes:
            self.flush()
        if self._buffer is None:
            self._buffer = self.channel.outlet.slots[self.channel.free_slot()]
        if not self._specs or self._specs[-1] is not spec:
            self._specs.append(spec)
        offset = aligned(self._used)
        raw = self._buffer[offset : offset + num_bytes].view(spec.dtype).view(boxes.sizes(box))
        raw.copy_(boxes.part(tensor.detach(), boxes.whole(spec.shape), box))
        total = boxes.volume(boxes.whole(spec.shape))
        self._pieces.append(Piece(tensor=len(self._specs) - 1, box=box, offset=offset, of_elements=total))
        self._used = offset + num_bytes


def _require_all_fed(control: WeightControl, tensors: dict[str, list[Any]]) -> None:
    """Every parameter of every worker is made of these tensors, and completely, as far as its loaders let us see."""
    traced = control.rpc("gcpo_trace", {"tensors": list(tensors.values())})
    unfed = sorted({name for worker in traced for name in worker["unfed"]})
    if unfed:
        raise ValueError(f"nothing was sent for a part of the engine's parameters {', '.join(map(repr, unfed[:5]))}")

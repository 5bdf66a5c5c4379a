"""An engine without vLLM: processes that hold the slices of a tensor-parallel engine, and the conversation of a push."""

from __future__ import annotations

import multiprocessing
import os
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_gcpo.config.records import PushConfig
from megatron_gcpo.reshard import deliver
from megatron_gcpo.reshard.adapters import split
from megatron_gcpo.reshard.boxes import Box
from megatron_gcpo.reshard.endpoint import Endpoint
from megatron_gcpo.reshard.fingerprint import dtype_name, dtype_named
from megatron_gcpo.reshard.window import Window

ROWS = re.compile(r"(q_proj|k_proj|v_proj|gate_proj|up_proj|embed_tokens|lm_head)\.(weight|bias)$")
COLUMNS = re.compile(r"(o_proj|down_proj)\.weight$")


def share(name: str, shape: Iterable[int], rank: int, size: int) -> tuple[int, int, int]:
    """(dimension, start, length) of what rank ``rank`` of ``size`` takes of a tensor; rows that do not divide go unevenly."""
    dim = 0 if ROWS.search(name) or not COLUMNS.search(name) else 1
    length = list(shape)[dim]
    if not ROWS.search(name) and not COLUMNS.search(name):
        return 0, 0, length
    step = -(-length // size)
    start = min(rank * step, length)
    return dim, start, min(step, length - start)


@dataclass
class Noted:
    name: str
    shape: tuple[int, ...]
    boxes: list[Box] = field(default_factory=list)

    def copy_box(self, target: torch.Tensor, box: Box) -> None:
        self.boxes.append(box)


class Worker:
    """What the worker extension is to vLLM."""

    def __init__(self, rank: int, size: int, dtype: torch.dtype | None) -> None:
        self.rank, self.size, self.dtype = rank, size, dtype
        self.parameters: dict[str, torch.Tensor] = {}
        self.base: str | None = None
        self.arrived: dict[str, torch.Tensor] = {}
        self.adopted: dict[str, torch.Tensor] = {}
        self.scale = 0.0
        self.endpoint = Endpoint(self.load, torch.device("cpu"))

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own, adapters = split(dict(weights))
        self.arrived |= adapters
        for name, weight in own.items():
            dim, start, length = share(name, weight.shape, self.rank, self.size)
            part = weight.narrow(dim, start, length)
            if name not in self.parameters:
                self.parameters[name] = torch.empty(part.shape, dtype=self.dtype or weight.dtype)
            self.parameters[name].copy_(part)

    def gcpo_describe(self) -> dict[str, Any]:
        return self.endpoint.describe()

    def gcpo_trace(self, tensors: list[list[Any]]) -> dict[str, Any]:
        needs = []
        for index, (name, shape, dtype) in enumerate(tensors):
            noted = Noted(name, tuple(shape))
            self.load([(name, Window.of(noted, dtype_named(dtype), torch.device("cpu")))])
            needs += [[index, box, dtype_name(self.parameters[name].dtype)] for box in noted.boxes]
        return {"name": self.endpoint.name, "needs": needs, "unfed": [], "reason": None}

    def gcpo_plan(self, tensors: list[Any], buckets: dict[str, Any]) -> None:
        self.endpoint.remember(tensors, buckets)

    def gcpo_begin(self, push: str, whole: bool, verify: bool, upon: str | None = None) -> None:
        assert upon in (None, self.base)
        self.base, self.arrived, self.adopted = upon, {}, {}
        self.endpoint.begin(push, whole=whole, verify=verify)

    def gcpo_adapters(self) -> dict[str, Any]:
        return {"taken": True, "base": self.base, "adopted": bool(self.adopted)}

    def gcpo_adopt(self, base: str, rank: int, alpha: int) -> None:
        self.base, self.adopted, self.scale = base, self.arrived, alpha / rank

    def gcpo_report(self, push: str) -> dict[str, Any]:
        return self.endpoint.report(push)

    def gcpo_abandon(self) -> None:
        self.endpoint.forget()

    def init_weight_transfer_engine(self, connection: str, transport: str, info: dict[str, Any]) -> None:
        self.endpoint.connect(connection, transport, info)

    def update_weights(self, push: str, bucket: int, message: Any, tensors: Any = (), pieces: Any = ()) -> None:
        self.endpoint.take(push, bucket, message, tensors, pieces)

    def read(self) -> dict[str, torch.Tensor]:
        return {name: tensor + self.delta(name) for name, tensor in self.parameters.items()}

    def delta(self, name: str) -> torch.Tensor | float:
        """This rank's slice of what the adapter adds to a parameter."""
        a, b = (self.adopted.get(f"{name.removesuffix('.weight')}.lora_{half}.weight") for half in "AB")
        if a is None or b is None:
            return 0.0
        whole = self.scale * b @ a
        return whole.narrow(*share(name, whole.shape, self.rank, self.size))

    def die(self) -> None:
        os._exit(9)


def serve(pipe: Any, rank: int, size: int, dtype: torch.dtype | None) -> None:
    torch.set_num_threads(1)
    worker = Worker(rank, size, dtype)
    while True:
        try:
            method, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, getattr(worker, method)(**kwargs)))
        except Exception as error:
            traceback.print_exc()
            pipe.send((f"{type(error).__name__}: {error}", None))


class PlainEngine:
    """RolloutEngine as far as a push goes, and WeightControl."""

    same_host = True

    def __init__(self, num_workers: int, dtype: torch.dtype | None = None) -> None:
        self.num_workers, self.dtype = num_workers, dtype
        self.policy_version, self.reason = 0, "none were loaded yet"
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for rank in range(self.num_workers):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            self.processes.append(
                context.Process(target=serve, args=(theirs, rank, self.num_workers, self.dtype), daemon=True)
            )
            self.processes[-1].start()
            theirs.close()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def control(self) -> PlainEngine:
        return self

    def rpc(self, method: str, arguments: Mapping[str, Any] | None = None) -> list[Any]:
        answers = self._ask(method, arguments)
        if answers is None:
            raise ValueError(f"a worker is gone: {method} was not answered")
        for problem, _ in answers:
            if problem is not None:
                raise ValueError(f"a worker failed in {method}: {problem}")
        return [answer for _, answer in answers]

    def _ask(self, method: str, arguments: Mapping[str, Any] | None) -> list[tuple[str | None, Any]] | None:
        """None: a worker is gone. The error of a broken pipe is let go of here: kept in a cycle, it crashes Python 3.12."""
        try:
            for pipe in self.pipes:
                pipe.send((method, dict(arguments or {})))
            return [pipe.recv() for pipe in self.pipes]
        except (OSError, EOFError):
            return None

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self.rpc("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.reason = "a load of weights did not complete"

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self.rpc("update_weights", update_info)

    def finish_weight_update(self, version: int) -> None:
        pass

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int | None = None) -> None:
        number = self.policy_version + 1 if version is None else version
        deliver(self, weights, version=number, push=PushConfig(bucket_bytes=20_000))
        self.commit(number)

    def commit(self, version: int) -> None:
        self.policy_version, self.reason = version, None

    def refuse(self, reason: str) -> None:
        self.reason = reason

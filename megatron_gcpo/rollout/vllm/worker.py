"""What runs inside every vLLM worker: the receiving end of weight pushes.

Start vLLM with ``worker_extension_cls=WORKER_EXTENSION`` and ``weight_transfer_config=WeightTransferConfig(backend=BACKEND)``:
importing this module registers the backend, and the extension's methods answer ``collective_rpc``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from megatron_gcpo.reshard.adapters import split
from megatron_gcpo.reshard.endpoint import Endpoint
from megatron_gcpo.rollout.vllm import reload
from megatron_gcpo.rollout.vllm.adopt import adopt
from megatron_gcpo.rollout.vllm.scoring import ScoreTemperature
from megatron_gcpo.rollout.vllm.trace import trace_needs

BACKEND = "megatron_gcpo"
WORKER_EXTENSION = "megatron_gcpo.rollout.vllm.worker.WorkerExtension"


@dataclass
class InitInfo(WeightTransferInitInfo):
    connection: str
    transport: str
    info: dict[str, Any]
    """Outlet.init_info()."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket. With ``tensors``, all workers get the same ``pieces``; else those of the plan they were given."""

    push: str
    bucket: int
    message: dict[str, Any]
    """Outlet.message()."""
    tensors: list[Any] = field(default_factory=list)
    pieces: list[Any] = field(default_factory=list)


class PushReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's side of a push: the four calls of its weight-transfer protocol end here."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.endpoint = Endpoint(self._load, self.device)
        self.base: str | None = None
        """What the weights are that were last pushed together with adapters (reshard.adapters); None: others."""
        self.upon: str | None = None
        """Those that the push under way leaves as they are; None: it brings all."""
        self.adapters: dict[str, torch.Tensor] = {}
        """That came of the push under way."""
        self._reloading = False
        self._traced: tuple[str, dict[str, Any]] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.endpoint.connect(**vars(init_info))

    def start_weight_update(self) -> None:
        self.adapters = {}
        if self.upon is not None:
            if self.upon != self.base:
                raise ValueError(f"adapters came for weights {self.upon}, but here are {self.base or 'others'}")
            return
        self.base = None
        reload.begin(self.model)
        self._reloading = True

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            self.endpoint.take(**vars(update_info))
        except BaseException:
            self.abandon()
            raise

    def finish_weight_update(self) -> None:
        self.end_reload()
        self.endpoint.forget()

    def shutdown(self) -> None:
        self.endpoint.disconnect()

    def abandon(self) -> None:
        """After a push that broke off: no layer stays half-made, though what the layers hold is a mixture."""
        self.endpoint.forget()
        self.adapters = {}
        self.end_reload()

    @torch.no_grad()
    def end_reload(self) -> None:
        if self._reloading:
            with set_current_vllm_config(self.vllm_config):
                reload.finish(self.model, self.model_config)
            self._reloading = False

    def trace(self, tensors: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """trace.trace_needs, once for every set of tensors."""
        key = json.dumps(tensors)
        if self._traced is None or self._traced[0] != key:
            self._traced = key, trace_needs(self.model, self.vllm_config, tensors)
        return self._traced[1]

    def _load(self, weights: Any) -> None:
        own, adapters = split(dict(weights))
        self.adapters |= adapters
        if own and self.upon is not None:
            raise ValueError(f"weights came in a push of adapters alone: {', '.join(sorted(own)[:5])}")
        if own:
            self.model.load_weights(own.items())  # pyright: ignore[reportCallIssue]


class WorkerExtension(ScoreTemperature):
    """Mixed into vLLM's worker class. Arguments and results are JSON values."""

    weight_transfer_engine: PushReceiver
    model_runner: Any
    _weight_update_active: bool

    def gcpo_describe(self) -> dict[str, Any]:
        """Who this worker is (Endpoint.describe)."""
        return self.weight_transfer_engine.endpoint.describe()

    def gcpo_trace(self, tensors: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """What of these Hugging Face tensors ([name, shape, dtype]) the model's own loaders take (trace.trace_needs)."""
        receiver = self.weight_transfer_engine
        return {"name": receiver.endpoint.name, **receiver.trace(tensors)}

    def gcpo_plan(self, tensors: Sequence[Any], buckets: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Remember what comes in pushes of parts (Endpoint.remember)."""
        self.weight_transfer_engine.endpoint.remember(tensors, buckets)

    def gcpo_begin(self, push: str, whole: bool, verify: bool, upon: str | None = None) -> None:
        """Before start_weight_update: name the push; one that broke off before is cleared away.

        upon: the weights that stay, below the adapters that come; None: all weights come.
        """
        self.gcpo_abandon()
        self.weight_transfer_engine.upon = upon
        self.weight_transfer_engine.endpoint.begin(push, whole=whole, verify=verify)

    def gcpo_report(self, push: str) -> dict[str, Any]:
        """After the last bucket: finish the layers and tell what came (Endpoint.report)."""
        self.weight_transfer_engine.end_reload()
        return self.weight_transfer_engine.endpoint.report(push)

    def gcpo_adapters(self) -> dict[str, Any]:
        """Whether adapters are taken here, the weights below (PushReceiver.base), and whether an adapter is in force."""
        taken = self.model_runner.lora_config is not None
        return {
            "taken": taken,
            "base": self.weight_transfer_engine.base,
            "adopted": taken and bool(self.model_runner.list_loras()),
        }

    def gcpo_adopt(self, base: str, rank: int, alpha: int) -> None:
        """After finish_weight_update, which drops all adapters: compute with the one that came."""
        receiver = self.weight_transfer_engine
        adopt(self.model_runner, receiver.adapters, rank=rank, alpha=alpha)
        receiver.adapters, receiver.base = {}, base

    def gcpo_forget_base(self) -> None:
        """Before a sleep that drops the weights: the next push brings all."""
        self.weight_transfer_engine.base = None

    def gcpo_abandon(self) -> None:
        """Clear a push away that broke off; harmless otherwise."""
        self.weight_transfer_engine.abandon()
        self._weight_update_active = False


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, PushReceiver)

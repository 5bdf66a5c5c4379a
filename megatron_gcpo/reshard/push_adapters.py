"""Pushes of adapters alone: the weights below them travel once, and stay in the engine's workers from push to push."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import torch

from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.config.records import PushConfig
from megatron_gcpo.policy.lora import export_adapters
from megatron_gcpo.policy.model import Policy
from megatron_gcpo.reshard.adapters import AdapterPush
from megatron_gcpo.reshard.deliver import deliver
from megatron_gcpo.reshard.gather import export_hf
from megatron_gcpo.reshard.link import gather_or_raise
from megatron_gcpo.reshard.push import push, refusing
from megatron_gcpo.reshard.stats import PushStats
from megatron_gcpo.rollout.engine import RolloutEngine, WeightControl


def push_adapters(
    policy: Policy,
    topology: Topology,
    config: PushConfig,
    folder: Path,
    engine: RolloutEngine | None,
    version: int | None,
) -> PushStats:
    """Give the engine the policy's adapters as this version; collective over all ranks.

    The weights below go along for workers that do not hold them: at first, and after they were started again, were pushed
    something else, or dropped them in their sleep.

    Raises ValueError as ``Pusher.push`` does.
    """
    assert policy.adapters is not None, "got a policy without adapters, expected some to push"
    base, settings = policy.adapters.base, policy.adapters.config
    alone = not _bases_wanted(topology, engine, base)
    adapters = AdapterPush(base=base, rank=settings.rank, alpha=settings.alpha, alone=alone)

    def load(engine: RolloutEngine, tensors: Iterable[tuple[str, torch.Tensor]], version: int | None) -> None:
        number = engine.policy_version + 1 if version is None else version
        assert engine.control is not None, "got an engine without workers"
        device = topology.platform.device
        try:
            deliver(
                engine.control,
                tensors,
                version=number,
                push=config,
                device=device,
                folder=folder,
                adapters=adapters,
            )
            engine.commit(number)
        except ValueError as error:
            engine.refuse(f"the last push failed: {error}")
            raise

    below = () if alone else export_hf(policy, merged=False)
    mode = "adapters" if alone else "full"
    return push(itertools.chain(below, export_adapters(policy)), engine, version=version, load=load, mode=mode)


def _bases_wanted(topology: Topology, engine: RolloutEngine | None, base: str) -> bool:
    """Whether any engine lacks the weights: as experts may be spread over replicas, all ranks export alike.

    Raises ValueError on all ranks when an engine takes no adapters or cannot be reached; it then refuses to serve.
    """
    here: bool | ValueError | None = None
    if engine is not None:
        try:
            assert engine.control is not None, "got an engine without workers"
            here = _lacks_base(engine.control, base)
        except ValueError as error:
            here = error
    with refusing(engine, "adapters"):
        return any(gather_or_raise(topology, here))


def _lacks_base(control: WeightControl, base: str) -> bool:
    workers = control.rpc("gcpo_adapters")
    if not all(worker["taken"] for worker in workers):
        raise ValueError("the engine was not started to take adapters: set rollout.vllm.lora=false")
    return any(worker["base"] != base for worker in workers)

"""Megatron models without memory for their weights, in a process that is no rank: to count, to cut, to translate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_gcpo.config.records import ClusterConfig
from megatron_gcpo.policy.build import prints_to_log


@contextmanager
def standing_at(rank: int, cluster: ClusterConfig) -> Iterator[None]:
    """Megatron's process groups as this rank would see them, with nobody at the other end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend that it is for

    assert not dist.is_initialized(), "got a process that is a rank already, expected one outside of any run"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=cluster.processes_per_node)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=cluster.tensor_model_parallel_size,
            pipeline_model_parallel_size=cluster.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=cluster.virtual_pipeline_model_parallel_size,
            context_parallel_size=cluster.context_parallel_size,
            expert_model_parallel_size=cluster.expert_model_parallel_size,
            expert_tensor_parallel_size=cluster.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def weightless_chunks(provider: Any) -> list[Any]:
    """The model chunks of the rank one stands at, on the meta device, without their data-parallel wrapper."""
    with prints_to_log():
        return provider.provide_distributed_model(
            wrap_with_ddp=False,
            use_cpu_initialization=provider.use_cpu_initialization,
            init_model_with_meta_device=True,
        )

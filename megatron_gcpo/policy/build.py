"""From a Hugging Face config or checkpoint to Megatron-Core model chunks, wrapped for data parallelism, with their weights.

megatron-bridge translates the config (provider.py) and the weights (weights.py). The same code runs on CPUs and on CUDA.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_gcpo.cluster.platform import Platform
from megatron_gcpo.config.records import ClusterConfig, ModelConfig
from megatron_gcpo.policy import lora, options
from megatron_gcpo.policy.model import Adapters, Policy
from megatron_gcpo.policy.provider import check_runs, make_provider, read_causal_lm
from megatron_gcpo.policy.rotary import make_rotary_exact
from megatron_gcpo.policy.weights import initialize, model_state

log = logging.getLogger(__name__)


def build(
    model: ModelConfig,
    cluster: ClusterConfig,
    platform: Platform,
    *,
    ddp: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Policy:
    """The policy of ``model`` on this rank of the initialised process groups, weights in place. Collective.

    ddp: DistributedDataParallelConfig options (train.ddp).
    seed: of the random weights, when the run starts from no checkpoint; they are the same for every layout.

    The weights are final: what copies them (a reference policy, an optimizer's masters) comes after.
    Raises ValueError when the architecture is unknown, a size does not divide, an option does not exist, or
    model.start_from cannot be started from.
    """
    hf_config = read_causal_lm(model)
    check_runs(hf_config, cluster, platform)
    bridge, provider = make_provider(model, cluster, platform, hf_config)
    # Dropout draws from Megatron's own streams: equal or distinct over tensor-parallel ranks as each place needs.
    model_parallel_cuda_manual_seed(seed)
    ddp_config = DistributedDataParallelConfig(**_ddp_options(ddp or {}))
    with prints_to_log():
        chunks = provider.provide_distributed_model(
            ddp_config=ddp_config,
            use_cpu_initialization=provider.use_cpu_initialization,
            pre_wrap_hook=None if model.lora is None else lora.adapt(model.lora),
        )
    _connect_schedule(provider, chunks, ddp_config)
    policy = Policy(
        chunks=chunks,
        bridge=bridge,
        hf_config=hf_config,
        provider=provider,
        platform=platform,
        vocab_size=hf_config.vocab_size,
    )
    make_rotary_exact(policy)
    _say_padding(policy)
    with prints_to_log():
        initialize(policy, model, seed)
    if model.lora is None:
        return policy
    return replace(policy, adapters=Adapters(config=model.lora, base=lora.fingerprint(policy, model_state(policy))))


def _ddp_options(given: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    # A step whose gradient is not finite is skipped and counted (actor.py); this check would end the run instead.
    reserved = {"check_for_nan_in_grad": "the trainer, which skips such a step", "average_in_collective": "the trainer"}
    return {**defaults, **options.checked("train.ddp", given, DistributedDataParallelConfig, reserved)}


def _connect_schedule(
    provider: Any, chunks: list[DistributedDataParallel], ddp_config: DistributedDataParallelConfig
) -> None:
    """Tell Megatron's schedules how gradients are finished and, when asked, overlapped with the backward pass."""

    def one_or_all(functions: list[Any]) -> Any:
        return functions[0] if len(functions) == 1 else functions

    provider.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        provider.no_sync_func = one_or_all([c.no_sync for c in chunks])
        if len(chunks) > 1:
            provider.grad_sync_func = one_or_all([c.start_grad_sync for c in chunks])
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        provider.param_sync_func = one_or_all([c.start_param_sync for c in chunks])


@contextlib.contextmanager
def prints_to_log() -> Iterator[None]:
    """Megatron and the bridge print and draw progress bars on every rank: keep that off the run's own output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
    log.debug(printed.getvalue())


def _say_padding(policy: Policy) -> None:
    tp = policy.provider.tensor_model_parallel_size
    padded = -(-policy.vocab_size // tp) * tp
    if padded != policy.vocab_size and dist.get_rank() == 0:
        log.warning(
            "vocabulary of %d padded to %d so that %d tensor-parallel ranks share it; padded ids are never predicted",
            policy.vocab_size,
            padded,
            tp,
        )

"""vLLM's layerwise reload, driven from outside, with what its CPU build needs around it.

A live engine has its weights prepacked for its kernels. ``begin`` gives every layer its checkpoint-shaped parameters back
(without memory), then the model's own ``load_weights`` fills and prepacks layer by layer, and ``finish`` ends it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform


def begin(model: torch.nn.Module) -> None:
    if current_platform.is_cpu():
        _keep_int8_scales()
        _forget_expert_kernels(model)
    initialize_layerwise_reload(model)


def finish(model: torch.nn.Module, model_config: Any) -> None:
    """Also after an incomplete reload: every layer is whole again, with old, new or arbitrary numbers."""
    with _warnings_off():
        finalize_layerwise_reload(model, model_config)
    if current_platform.is_cpu():
        _repack_tied_output(model)


@contextmanager
def bare_parameters(model: torch.nn.Module, model_config: Any) -> Iterator[None]:
    """Checkpoint-shaped parameters without memory, under the model's own weight loaders; undone on leaving.

    For looking at what the loaders do: nothing they copy is kept.
    """
    initialize_layerwise_reload(model)
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        while loader is not None and loader.__name__ == "online_process_loader":
            loader = loader.__wrapped__
        if loader is not None:
            parameter.weight_loader = loader  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        with _warnings_off():
            finalize_layerwise_reload(model, model_config)


@contextmanager
def _warnings_off() -> Iterator[None]:
    """vLLM warns of every layer that got no weights, also of those that have none of their own; trace.py knows better."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """The CPU build packs the experts only while a layer has no kernel yet: on a reload it would run unpacked ones."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # pyright: ignore[reportOptionalMemberAccess]


def _repack_tied_output(model: torch.nn.Module) -> None:
    """A tied output layer multiplies with a packed copy of the embedding that no reload touches: pack it anew."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), UnquantizedEmbeddingMethod) and hasattr(
            module, "cpu_linear"
        ):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


@functools.cache
def _keep_int8_scales() -> None:
    """The handler of an int8 product points to scales that the reload frees: let each keep a copy of its own."""
    from vllm import _custom_ops

    create: Callable[..., Any] = _custom_ops.create_onednn_scaled_mm

    @functools.wraps(create)
    def create_with_own_scales(weight: torch.Tensor, weight_scales: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = weight_scales.detach().clone()
        handler = create(weight, own, *args, **kwargs)
        handler.own_scales = own
        return handler

    _custom_ops.create_onednn_scaled_mm = create_with_own_scales

"""An adapter that was pushed becomes the one that a vLLM worker computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from megatron_gcpo.rollout.vllm.adapters import ADAPTER_ID


def adopt(runner: Any, tensors: Mapping[str, torch.Tensor], *, rank: int, alpha: int) -> None:
    """Put the adapter in the place of the one there was. It keeps, and scales, the tensors it is given.

    Args:
        runner: vLLM's model runner, of an engine that was started for adapters.
        tensors: all of the adapter, whole, by PEFT's names without prefix.

    Raises:
        ValueError: a matrix has half an adapter, or one of another size, or is none that this engine adapts.
    """
    worker_manager = runner.lora_manager
    manager = worker_manager._adapter_manager
    model = manager.model
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        lora_model_id=ADAPTER_ID,
        tensors=dict(tensors),
        peft_helper=PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),
        device="cpu",
        dtype=worker_manager.lora_config.lora_dtype,
        model_vocab_size=worker_manager.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    _require_known(manager, adapter, rank)
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)  # joins what vLLM computes as one matrix: q, k and v; gate and up
    _require_sizes(manager, adapter, rank)
    manager.activate_adapter(ADAPTER_ID)


def _require_known(manager: Any, adapter: Any, rank: int) -> None:
    parts = {part for whole in manager.packed_modules.values() for part in whole}
    known = parts | (manager.modules.keys() - manager.packed_modules.keys())
    if unknown := sorted(adapter.loras.keys() - known):
        raise ValueError(f"the engine has no adapter on {', '.join(unknown[:5])}")
    for name, layer in adapter.loras.items():
        if layer.lora_a is None or layer.lora_b is None:
            raise ValueError(f"the adapter on {name} came without its {'A' if layer.lora_a is None else 'B'}")
        if layer.lora_a.shape[0] != rank or layer.lora_b.shape[1] != rank:
            raise ValueError(f"the adapter on {name} is not of rank {rank}")


def _require_sizes(manager: Any, adapter: Any, rank: int) -> None:
    """vLLM would fill a part of its buffers with a smaller adapter, and compute."""
    for name, module in manager.modules.items():
        layer = adapter.get_lora(name)
        if layer is None:
            continue
        a, b = layer.lora_a, layer.lora_b
        if module.tp_size > 1:
            a, b = module.slice_lora_a(a), module.slice_lora_b(b)
        pairs = zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]
        for (a_RI, b_OR), room_a, room_b in zip(pairs, module.lora_a_stacked, module.lora_b_stacked, strict=True):
            if a_RI is None:  # one of q, k and v may go without
                continue
            wanted = (rank, room_a.shape[-1]), (room_b.shape[-2], rank)
            if (tuple(a_RI.shape), tuple(b_OR.shape)) != wanted:
                raise ValueError(
                    f"the adapter on {name} is {tuple(a_RI.shape)} and {tuple(b_OR.shape)} here, but the matrix takes "
                    f"{wanted[0]} and {wanted[1]}"
                )

"""What a vLLM model needs of a checkpoint, found out by watching its own weight loaders.

The loaders run once over windows (reshard.window) and parameters without memory; every copy tells which box of which tensor
goes where. Fused projections, experts, the share of a tensor-parallel rank and the cut of the vocabulary come out by
themselves, for every architecture whose loaders only cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from megatron_gcpo.reshard.boxes import Box, volume
from megatron_gcpo.reshard.fingerprint import dtype_name, dtype_named
from megatron_gcpo.reshard.window import Untraceable, Window
from megatron_gcpo.rollout.vllm import reload


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A tensor that takes note of what is copied out of it."""

    name: str
    shape: tuple[int, ...]
    copies: list[tuple[Box, torch.Tensor]] = field(default_factory=list)

    def copy_box(self, target: torch.Tensor, box: Box) -> None:
        self.copies.append((box, target))


def trace_needs(model: torch.nn.Module, vllm_config: Any, tensors: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """JSON values.

    Args:
        tensors: [name, shape, dtype name] of the checkpoint's tensors.

    Returns:
        needs: [index into tensors, box, dtype name of the parameter] of every copy into a parameter.
        unfed: names of parameters of which some elements get nothing.
        reason: why the model cannot be traced; None: it can.
    """
    noted = [Noted(name=name, shape=tuple(shape)) for name, shape, _ in tensors]
    # Of tied parameters one name: on a reload vLLM undoes the tie for a while, and feeds one of them.
    names = [name for name, _ in model.named_parameters()]
    with set_current_vllm_config(vllm_config), reload.bare_parameters(model, vllm_config.model_config):
        device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        windows = [
            (t.name, Window.of(t, dtype_named(dtype), device)) for t, (_, _, dtype) in zip(noted, tensors, strict=True)
        ]
        try:
            with torch.no_grad():
                model.load_weights(windows)  # pyright: ignore[reportCallIssue]
        except Untraceable as error:
            return {"needs": [], "unfed": [], "reason": str(error)}
        except (KeyError, ValueError, RuntimeError, AssertionError) as error:
            reason = f"the model's weight loader refuses the checkpoint: {type(error).__name__}: {error}"
            return {"needs": [], "unfed": [], "reason": reason}
        unfed = _unfed(model, names, noted)
    needs = [
        [index, [list(side) for side in box], dtype_name(target.dtype)]
        for index, tensor in enumerate(noted)
        for box, target in tensor.copies
    ]
    return {"needs": needs, "unfed": unfed, "reason": None}


def _unfed(model: torch.nn.Module, names: Sequence[str], noted: Sequence[Noted]) -> list[str]:
    fed: dict[int, int] = {}
    for tensor in noted:
        for box, target in tensor.copies:
            storage = target.untyped_storage()._cdata
            fed[storage] = fed.get(storage, 0) + volume(box)
    padding, parameters = _padding(model), dict(model.named_parameters())
    # scales that vLLM makes of loaded weights are no parameters of the bare model
    return sorted(
        name
        for name in names
        if name in parameters
        and fed.get(parameters[name].untyped_storage()._cdata, 0) + padding.get(name, 0) != parameters[name].numel()
    )


def _padding(model: torch.nn.Module) -> dict[str, int]:
    """Elements of parameters that stand for no token of the vocabulary."""
    return {
        f"{name}.{own}": parameter.numel() - module.shard_indices.num_org_elements * parameter[0].numel()
        for name, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding)
        for own, parameter in module.named_parameters(recurse=False)
    }

"""Where each tensor of a Hugging Face checkpoint lives inside a transformers model in memory.

For most models the names agree. Mixture-of-experts models keep all experts of a layer in one parameter while their
checkpoints have one tensor per expert; transformers knows the rule as code that splits tensors. Running that code on
the *element numbers* of a parameter instead of its values tells where every checkpoint tensor comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A strided window of a model's parameter that holds one checkpoint tensor."""

    parameter: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The window of ``Module.state_dict()``'s tensors; shares their memory."""
        whole = parameters[self.parameter]
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


def checkpoint_slots(model: PreTrainedModel) -> dict[str, Slot]:
    """Checkpoint name -> slot, for every parameter and persistent buffer. Tied names share one slot.

    Raises:
        ValueError: the model's checkpoint format is not a rearrangement of its parameters.
    """
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    slots: dict[str, Slot] = {}
    first_name: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in model.state_dict().items():
        owner = first_name.setdefault((tensor.data_ptr(), tensor.shape), name) if tensor.numel() else name
        if not conversions:
            slots[name] = Slot(parameter=owner, shape=tuple(tensor.shape), stride=_dense_stride(tensor.shape), offset=0)
            continue
        numbers = torch.arange(tensor.numel())
        for piece_name, piece in revert_weight_conversion(model, {name: numbers.view(tensor.shape)}).items():
            slots[piece_name] = _window(owner, piece, numbers, type(model).__name__)
    return slots


def _dense_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _window(parameter: str, piece: torch.Tensor, numbers: torch.Tensor, model_name: str) -> Slot:
    """The window of the elements ``numbers`` = 0, 1, 2, ... of a parameter that ``piece`` is."""
    shape = tuple(piece.shape)
    offset = int(piece.flatten()[0])
    stride = tuple(
        int(piece.select(axis, 1).flatten()[0]) - offset if length > 1 else 1 for axis, length in enumerate(shape)
    )
    last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    regular = min(stride, default=1) > 0 and last < numbers.numel()
    if not regular or not torch.equal(numbers.as_strided(shape, stride, offset), piece):
        raise ValueError(
            f"the checkpoint format of {model_name} is not a plain rearrangement of {parameter!r}; the transformers "
            "engine cannot load this model piece by piece: choose another rollout.engine"
        )
    return Slot(parameter=parameter, shape=shape, stride=stride, offset=offset)


def load_into(model: PreTrainedModel, slots: dict[str, Slot], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy a complete set of checkpoint tensors into the model, casting to its dtype.

    Of tied names one is enough; when several are sent they must be equal.

    Raises:
        ValueError: a tensor is unknown, repeated, wrongly shaped, unequal to the one it is tied to, or missing. The
            model then holds a mixture, which the caller must not serve.
    """
    parameters = dict(model.state_dict())
    seen: set[str] = set()
    filled: set[Slot] = set()
    for name, tensor in weights:
        slot = slots.get(name)
        if slot is None:
            raise ValueError(f"{name!r} is no tensor of {type(model).__name__}; its checkpoint has e.g. {min(slots)!r}")
        if name in seen:
            raise ValueError(f"{name!r} was sent twice")
        if tuple(tensor.shape) != slot.shape:
            raise ValueError(f"{name!r} has shape {tuple(tensor.shape)}, but the engine's has {slot.shape}")
        seen.add(name)
        target = slot.of(parameters)
        if slot in filled:
            if not torch.equal(target, tensor.to(target)):
                raise ValueError(f"{name!r} differs from {slot.parameter!r}, to which it is tied")
            continue
        target.copy_(tensor)
        filled.add(slot)
    missing = sorted({name for name, slot in slots.items() if slot not in filled})
    if missing:
        raise ValueError(f"{len(missing)} tensors did not arrive, e.g. {', '.join(map(repr, missing[:3]))}")

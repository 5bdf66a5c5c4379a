"""Low-rank adapters (LoRA, arXiv 2106.09685) on the policy, by megatron-bridge; the weights below them are frozen.

An adapted matrix W becomes W + alpha / rank x B A. B starts at zero, so a fresh policy is the model itself, and with its
adapters off it is the model again: the reference of a KL term needs no copy. Megatron keeps q, k and v (and gate and up)
in one matrix, whose adapters share one A.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica

from megatron_gcpo.config.records import LoraConfig
from megatron_gcpo.policy.model import Policy, unwrapped
from megatron_gcpo.seeds import derive_seed

MARK = ".adapter."
"""In the name of every tensor of an adapter, and of no other."""
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def adapt(lora: LoraConfig) -> Callable[[list[Any]], list[Any]]:
    """What makes model chunks adapted and freezes the rest; for the moment between their making and their wrapping.

    Raises ValueError when the model lacks a target, or has experts that would be one.
    """

    def hook(chunks: list[Any]) -> list[Any]:
        from megatron.bridge.peft import recompute
        from megatron.bridge.peft.lora import LoRA

        _check_targets(lora, chunks)
        # It remembers by address which models it has prepared for recomputation, also those that are gone.
        recompute.PEFT_RECOMPUTE_PATCHED.clear()
        peft: Any = LoRA(target_modules=list(lora.target_modules), dim=lora.rank, alpha=lora.alpha)
        return peft(chunks, training=True)

    return hook


def _check_targets(lora: LoraConfig, chunks: list[Any]) -> None:
    names = {name for chunk in chunks for name, _ in chunk.named_modules()}
    found = {name.rsplit(".", 1)[-1] for name in names}
    if missing := [target for target in lora.target_modules if target not in found]:
        raise ValueError(
            f"model.lora.target_modules {', '.join(missing)}: this model has no such matrices; leave them out"
        )
    experts = {name.rsplit(".", 1)[-1] for name in names if ".experts." in name} & set(lora.target_modules)
    if experts:
        # Of experts that ranks share out, AutoBridge merges and exports the first rank's adapters for all.
        rest = [target for target in lora.target_modules if target not in experts]
        raise ValueError(
            f"model.lora.target_modules {', '.join(sorted(experts))}: adapters on the experts of a mixture are not "
            "supported (megatron-bridge mixes up those of experts that ranks share out); set it to "
            f"[{', '.join(rest) or 'linear_qkv'}]"
        )


def draw(policy: Policy, seed: int) -> None:
    """Fill fresh adapters: A uniform in +-1 / sqrt(inputs), B zero.

    A function of the seed and the matrix's place in the model alone, whatever the layout.
    """
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    for name, adapter in _adapters(policy):
        share = adapter.linear_in.weight
        axis = 1 if adapter.input_is_parallel else 0
        shape = list(share.shape)
        shape[axis] *= tp_size
        generator = torch.Generator().manual_seed(derive_seed(seed, "policy.lora", prompt_id=name))
        bound = shape[1] ** -0.5
        whole = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            share.copy_(whole.chunk(tp_size, dim=axis)[tp_rank])
            adapter.linear_out.weight.zero_()


def _adapters(policy: Policy) -> Iterator[tuple[str, Any]]:
    """(name of the adapted matrix, counting layers over all stages; its adapter) of this rank."""
    for chunk in unwrapped(policy):
        layers = chunk.decoder.layers

        def number(match: re.Match[str], layers: Any = layers) -> str:
            return f"layers.{layers[int(match[1])].layer_number - 1}."

        for name, module in chunk.named_modules():
            if name.endswith(MARK.rstrip(".")):
                yield re.sub(r"layers\.(\d+)\.", number, name.removesuffix(MARK.rstrip(".")), count=1), module


@contextmanager
def adapters_off(policy: Policy) -> Iterator[None]:
    """The model without its adapters."""
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper

    wrappers = [m for chunk in unwrapped(policy) for m in chunk.modules() if isinstance(m, AdapterWrapper)]
    for wrapper in wrappers:
        wrapper.disable_adapter_layers()
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper.enable_adapter_layers()


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the model's own tensors, the adapters') of a state dict."""
    own = {name: value for name, value in state.items() if MARK not in name}
    return own, {name: value for name, value in state.items() if MARK in name}


def wrapped_names(module: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict as ``load_state_dict`` wants it: checkpoints know nothing of the wrappers around adapted matrices."""
    prefixes = {name.removesuffix("adapter") for name, _ in module.named_modules() if name.endswith(".adapter")}
    renamed = {}
    for name, value in state.items():
        prefix = name.rsplit(".", 1)[0] + "."
        renamed[f"{prefix}to_wrap.{name.removeprefix(prefix)}" if prefix in prefixes else name] = value
    return renamed


def fingerprint(policy: Policy, state: Mapping[str, Mapping[str, Any]]) -> str:
    """What identifies the frozen weights: the sum of their bits as integers, whatever the layout. Collective.

    state: ``weights.model_state(policy)``.
    """
    total = torch.zeros(1, dtype=torch.int64, device=policy.device)
    for part in state.values():
        for name, shard in split_state(part)[0].items():
            if isinstance(shard, ShardedTensor | ShardedTensorFactory) and is_main_replica(shard.replica_id):
                total += _bits(_true_rows(name, shard, policy.vocab_size))
    torch.distributed.all_reduce(total)
    return f"{int(total) % 2**64:016x}"


def _true_rows(name: str, shard: Any, vocab_size: int) -> torch.Tensor:
    """Without the padding of the vocabulary, which is another in every layout."""
    if not name.endswith(_VOCABULARY):
        return shard.data
    return shard.data[: max(0, vocab_size - shard.global_offset[0])]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.detach().contiguous().view(integers).sum(dtype=torch.int64)


def export_adapters(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name of the matrix + ".lora_A.weight" or ".lora_B.weight", whole tensor).

    Collective: exhaust it on every rank.
    """
    for name, tensor in policy.bridge.export_adapter_weights(policy.chunks, cpu=False, show_progress=False):
        yield name, tensor.detach()

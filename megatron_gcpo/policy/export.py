"""The policy as others read it: a Hugging Face checkpoint, or adapters in the format of PEFT, in a folder of the run.

A folder ``<run>/hf/step_00000050`` is written under another name and renamed once it is whole.
"""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedTokenizerBase

from megatron_gcpo.config.records import LoraConfig, ModelConfig
from megatron_gcpo.convert.hf_writer import write_checkpoint
from megatron_gcpo.policy import manifest as manifests
from megatron_gcpo.policy.actor import Actor
from megatron_gcpo.policy.lora import export_adapters

Tensors = Iterable[tuple[str, torch.Tensor]]


def folder(run_dir: str | Path, step: int) -> Path:
    return Path(run_dir) / "hf" / f"step_{step:08d}"


def export(
    run_dir: str | Path,
    actor: Actor,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    step: int,
    merged: bool = False,
) -> Path:
    """Write the policy of ``step``; the folder. Collective over all ranks; rank 0 holds one file of tensors at a time.

    Args:
        model: where the run's model came from; its tokenizer and generation config go along.
        tokenizer: of the run; wanted on rank 0.
        merged: of a policy with adapters, the whole model with them merged in.

    Raises:
        ValueError: the folder was not written; nothing of it remains.
    """
    target = folder(run_dir, step)
    adapters = None if merged or actor.policy.adapters is None else actor.policy.adapters.config
    tensors = iter(actor.export() if adapters is None else export_adapters(actor.policy))
    problem = None
    if actor.topology.rank == 0:
        assert tokenizer is not None, "got no tokenizer on rank 0, expected the run's"
        try:
            if adapters is None:
                _write_model(target, tensors, actor, model, tokenizer)
            else:
                _write_adapters(target, tensors, adapters, model, tokenizer)
        except (OSError, ValueError) as error:
            problem = str(error).strip().splitlines()[0]
            manifests.remove(target.with_name(target.name + manifests.PARTIAL))
    for _ in tensors:  # collective: the peers are walking it too
        pass
    if problem := actor.topology.broadcast_object_to_all(problem):
        raise ValueError(f"the Hugging Face export of step {step} was not written: {problem}")
    return target


def _write_model(
    target: Path, tensors: Tensors, actor: Actor, model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = copy.deepcopy(actor.policy.hf_config)
    config.dtype = actor.policy.dtype
    with _companions(model, tokenizer) as beside:
        write_checkpoint(
            target,
            ((name, tensor.cpu()) for name, tensor in tensors),
            hf_config=config,
            carry_from=beside,
        )


@contextlib.contextmanager
def _companions(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Path]:
    """A folder with the tokenizer and the generation config: the one the model came from, when it is a folder."""
    if model.path is not None and model.tokenizer is None and Path(model.path).is_dir():
        yield Path(model.path)
        return
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save_pretrained(name)
        if model.path is not None:
            with contextlib.suppress(OSError):  # most models on a hub have one, some have none
                GenerationConfig.from_pretrained(model.path).save_pretrained(name)
        yield Path(name)


def _write_adapters(
    target: Path, tensors: Tensors, lora: LoraConfig, model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    def write(partial: Path) -> None:
        state = {f"base_model.model.{name}": tensor.cpu().contiguous() for name, tensor in tensors}
        matrices = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in state}
        save_file(_unshared(state), partial / "adapter_model.safetensors", metadata={"format": "pt"})
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": model.path,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(matrices),
            "inference_mode": True,
        }
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        tokenizer.save_pretrained(partial)

    _in_place_once_whole(target, write)


def _unshared(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices that share one A each get their own: safetensors refuses tensors in the same memory."""
    seen: set[int] = set()
    result = {}
    for name, tensor in state.items():
        result[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return result


def _in_place_once_whole(target: Path, write: Callable[[Path], None]) -> None:
    partial = target.with_name(target.name + manifests.PARTIAL)
    manifests.remove(partial)
    partial.mkdir(parents=True)
    try:
        write(partial)
        manifests.remove(target)
        manifests.rename(partial, target)
    except BaseException:
        manifests.remove(partial)
        raise

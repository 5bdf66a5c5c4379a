"""Where the weights of a new policy come from: a checkpoint of ours or of Megatron-Core, one of Hugging Face, or random
numbers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from megatron_gcpo.config.records import ModelConfig
from megatron_gcpo.policy import foreign, lora
from megatron_gcpo.policy import manifest as manifests
from megatron_gcpo.policy.model import Policy, unwrapped
from megatron_gcpo.policy.source import find_foreign

log = logging.getLogger(__name__)

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Optimizer state in the shapes of the weights, and experts' under the same names as the rest: any layout can read it."""


def initialize(policy: Policy, model: ModelConfig, seed: int) -> None:
    """Fill the policy from model.start_from, else model.path, else at random by ``seed``. Collective over all ranks.

    The layout and the dtype of a checkpoint may be others. Call it before an optimizer copies the weights. A checkpoint
    of adapters alone gives those, and the model below them comes from model.path, or from the seed.

    Raises ValueError when model.start_from has no complete checkpoint, or one of another model.
    """
    theirs = None if model.start_from is None else find_foreign(model.start_from)
    ours = None if model.start_from is None or theirs else manifests.resolve_start(model.start_from)
    manifest = None
    if ours is not None:
        manifest = manifests.read(ours)
        manifests.check_model(manifest, policy.hf_config, ours)
        manifests.check_start(manifest, model.lora, ours)
    if theirs is not None:
        put_weights(policy, foreign.load(theirs, without_adapters(model_state(policy)), policy.vocab_size))
    elif ours is not None and manifest is not None and manifest.lora is None:
        put_weights(policy, _read(ours, without_adapters(model_state(policy))))
    elif model.path is not None:
        policy.bridge.load_hf_weights(policy.chunks)
    else:
        source = _RandomCheckpoint.draw(policy.hf_config, seed)
        policy.bridge._model_bridge.load_weights_hf_to_megatron(source, policy.chunks)
    if model.lora is not None:
        lora.draw(policy, seed)
    if ours is not None and manifest is not None and manifest.lora is not None:
        manifests.check_base(manifest, lora.fingerprint(policy, model_state(policy)), ours)
        put_weights(policy, _read(ours, adapters_alone(model_state(policy))))
    if model.start_from is not None and dist.get_rank() == 0:
        log.info("starting from the weights of %s", theirs or ours)


def _read(path: Path | None, state: dict[str, Any]) -> dict[str, Any]:
    loaded: Any = dist_checkpointing.load(state, str(path))
    return loaded


def model_state(policy: Policy) -> dict[str, Any]:
    """This rank's weights as dist_checkpointing stores and finds them."""
    return {
        f"model{i}": module.sharded_state_dict(metadata=dict(SHARDING)) for i, module in enumerate(unwrapped(policy))
    }


def without_adapters(state: dict[str, Any]) -> dict[str, Any]:
    """Of a ``model_state``, the model's own tensors."""
    return {part: lora.split_state(tensors)[0] for part, tensors in state.items()}


def adapters_alone(state: dict[str, Any]) -> dict[str, Any]:
    """Of a ``model_state``, what LoRA trains."""
    return {part: lora.split_state(tensors)[1] for part, tensors in state.items()}


def put_weights(policy: Policy, loaded: dict[str, Any]) -> None:
    """The opposite of ``model_state``: copy what was read, all of it or one of its two halves, into the model."""
    for index, module in enumerate(unwrapped(policy)):
        state = loaded[f"model{index}"]
        names = lora.wrapped_names(module, state)
        result = module.load_state_dict(names, strict=False)
        present = {lora.MARK in name for name in state}
        wanted = [name for name in result.missing_keys if not name.endswith("_extra_state")]
        missing = [name for name in wanted if (lora.MARK in name) in present]
        assert not missing, f"got no {missing[:3]}, expected every tensor of the model"
        assert not result.unexpected_keys, f"got {result.unexpected_keys[:3]}, expected tensors of the model only"


def random_hf_state(hf_config: PretrainedConfig, seed: int) -> dict[str, torch.Tensor]:
    """fp32 CPU tensors under the names of a saved Hugging Face checkpoint; a function of the config and the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf_model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    return dict(revert_weight_conversion(hf_model, hf_model.state_dict()))


@dataclass(frozen=True, kw_only=True)
class _RandomCheckpoint:
    """Random weights that look to the bridge like a checkpoint on disk."""

    config: PretrainedConfig
    state: Any
    """The bridge's StateDict."""
    model_name_or_path: str = "random weights"

    @classmethod
    def draw(cls, hf_config: PretrainedConfig, seed: int) -> _RandomCheckpoint:
        """The Hugging Face model's own initialisation: every rank draws the same whole model, whatever the layout."""
        from megatron.bridge.models.hf_pretrained.state import StateDict

        return cls(config=hf_config, state=StateDict(random_hf_state(hf_config, seed)))

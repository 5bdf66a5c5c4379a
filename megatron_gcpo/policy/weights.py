"""Where the weights of a new policy come from: a run of ours, a Hugging Face checkpoint, or random numbers."""

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
from megatron_gcpo.policy import manifest as manifests
from megatron_gcpo.policy.model import Policy, unwrapped

log = logging.getLogger(__name__)

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""Optimizer state in the shapes of the weights, and experts' under the same names as the rest: any layout can read it."""


def initialize(policy: Policy, model: ModelConfig, seed: int) -> None:
    """Fill the policy from model.start_from, else model.path, else at random by ``seed``. Collective over all ranks.

    Raises ValueError when model.start_from has no complete checkpoint, or one of another model.
    """
    if model.start_from is not None:
        step = load_weights(manifests.resolve_start(model.start_from), policy)
        if dist.get_rank() == 0:
            log.info("starting from the weights of step %d of %s", step, model.start_from)
    elif model.path is not None:
        policy.bridge.load_hf_weights(policy.chunks)
    else:
        source = _RandomCheckpoint.draw(policy.hf_config, seed)
        policy.bridge._model_bridge.load_weights_hf_to_megatron(source, policy.chunks)


def load_weights(path: str | Path, policy: Policy) -> int:
    """Weights alone, from a checkpoint or the newest one of a run; the step they are of. Collective over all ranks.

    The layout and the dtype that saved them may be others. Call it before an optimizer copies the weights.

    Raises ValueError when there is no complete checkpoint, or it holds another model.
    """
    found = manifests.resolve(path)
    manifest = manifests.read(found)
    manifests.check_model(manifest, policy.hf_config, found)
    loaded: Any = dist_checkpointing.load(model_state(policy), str(found))
    put_weights(policy, loaded)
    return manifest.step


def model_state(policy: Policy) -> dict[str, Any]:
    """This rank's weights as dist_checkpointing stores and finds them."""
    return {
        f"model{i}": module.sharded_state_dict(metadata=dict(SHARDING)) for i, module in enumerate(unwrapped(policy))
    }


def put_weights(policy: Policy, loaded: dict[str, Any]) -> None:
    """The opposite of ``model_state``: copy what was read into the model."""
    for index, module in enumerate(unwrapped(policy)):
        module.load_state_dict(loaded[f"model{index}"])


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

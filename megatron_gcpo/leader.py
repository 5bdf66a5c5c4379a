"""What only the leader of a replica holds and does: everything that sees text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.config.records import Config
from megatron_gcpo.data import CurriculumSampler, PromptSampler, PromptSet, load_prompts, make_sampler, make_task
from megatron_gcpo.data.template import turn_frame
from megatron_gcpo.embed import Encoder
from megatron_gcpo.environments import Environment, play
from megatron_gcpo.methods import EMBEDDING_NEEDS, Method, MethodOptions, Need
from megatron_gcpo.rollout import RolloutEngine, Sampling, generate_groups
from megatron_gcpo.rollout.background import Background, Rollouts, Synchronous
from megatron_gcpo.rollout.build import make_engine
from megatron_gcpo.types import Group, Rollout
from megatron_gcpo.verify.pool import VerifierPool


@dataclass(frozen=True, kw_only=True)
class Leader:
    """What only the leader of a replica holds: everything that sees text."""

    tokenizer: Any
    prompts: PromptSet
    heldout: PromptSet | None
    sampler: PromptSampler | CurriculumSampler
    engine: RolloutEngine
    rollouts: Rollouts
    """Draws the groups of the steps with ``engine``, maybe ahead of time."""
    sampling: Sampling
    pool: VerifierPool
    encoder: Encoder | None
    """None when neither the method nor an evaluation compares rollouts; loading one takes seconds."""
    strategy_of: Callable[[str], str | None] | None
    """Labels a solution's strategy, for measuring only; packaged tasks know theirs."""

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def reference_rollout(self, prompt: int, max_new_tokens: int) -> Rollout | None:
        """The prompt's worked solution of largest weight as if it had been sampled; no engine drew it: log-probs are NaN.

        None when there is none, or none that fits max_new_tokens.
        """
        texts, weights = self.prompts.demonstrations(prompt), self.prompts.demonstration_weights_P[prompt]
        if not texts:
            return None
        text = texts[max(range(len(texts)), key=lambda i: weights[i])]
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        if len(ids) > max_new_tokens:
            return None
        return Rollout(
            token_ids=np.asarray(ids, dtype=np.int64),
            logprobs=np.full(len(ids), np.nan, dtype=np.float32),
            text=text,
            finish_reason="stop",
            versions_T=np.full(len(ids), self.engine.policy_version, dtype=np.int32),
        )


def make_leader(
    config: Config,
    topology: Topology,
    tokenizer: Any,
    prompts: PromptSet,
    hf_config: Any,
    needs: frozenset[Need],
    method: Method,
    options: MethodOptions,
) -> Leader:
    """Everything that sees text, on the leader of a replica; its engine holds no weights yet."""
    rollout = config.rollout
    heldout = None if config.data.heldout is None else load_prompts(config.data.heldout, config.data, tokenizer)
    sampling = Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=(tokenizer.eos_token_id, *rollout.stop_token_ids),
    )
    engine = make_engine(
        config, hf_config, topology.platform, replica=topology.replica, num_replicas=topology.num_replicas
    )
    sampler = make_sampler(
        options.sampler,
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
        rollouts=_rollouts(config, topology.replica, prompts, sampler, engine, sampling, tokenizer, method.environment),
        sampling=sampling,
        pool=VerifierPool(config.verify),
        encoder=Encoder(config.embed, topology.platform.device) if needs & EMBEDDING_NEEDS or heldout else None,
        strategy_of=_strategy_of(config),
    )


def _rollouts(
    config: Config,
    replica: int,
    prompts: PromptSet,
    sampler: PromptSampler | CurriculumSampler,
    engine: RolloutEngine,
    sampling: Sampling,
    tokenizer: Any,
    environment: Environment | None,
) -> Rollouts:
    rollout = config.rollout
    frame = turn_frame(config.data, tokenizer)
    if environment is not None:  # whether it can be said at all is known before anything is drawn
        frame(environment.reply(prompts.prompts[0], ("",), 0))

    def draw(step: int, round: int) -> list[Group]:
        settings: dict[str, Any] = {
            "max_new_tokens": rollout.max_new_tokens,
            "sampling": sampling,
            "decode": lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            "run_seed": config.run.seed,
            "step": step,
        }
        wanted = [prompts.prompts[i] for i in sampler.share(step, replica, round)]
        groups = generate_groups(engine, wanted, group_size=rollout.group_size, **settings)
        if environment is None:
            return groups
        return play(engine, groups, environment, frame=frame, **settings)

    if rollout.max_policy_lag == 0 or config.run.stage != "rl":
        return Synchronous(draw=draw)
    return Background(draw, engine, max_lag=rollout.max_policy_lag, num_steps=config.run.steps)


def _strategy_of(config: Config) -> Callable[[str], str | None] | None:
    source = config.data.train
    if source.kind != "task":
        return None
    strategy = make_task(source.name, source.options).strategy

    def label(text: str) -> str | None:
        name = strategy(text)
        return None if name == "none" else name

    return label

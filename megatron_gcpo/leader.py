"""What only the leader of a replica holds and does: everything that sees text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_gcpo.cluster.topology import Topology
from megatron_gcpo.config.records import Config
from megatron_gcpo.data import JudgedSampler, PromptSet, Sampler, load_prompts, make_sampler
from megatron_gcpo.data.template import turn_frame
from megatron_gcpo.embed import Encoder
from megatron_gcpo.environments import Environment, checked_frame, converse
from megatron_gcpo.evaluate.run import Labeller, task_labeller
from megatron_gcpo.judge import Judge, question_encoder
from megatron_gcpo.methods import EMBEDDING_NEEDS, Method, MethodOptions, Need
from megatron_gcpo.rollout import RolloutEngine, Sampling
from megatron_gcpo.rollout.background import Background, Rollouts, Synchronous
from megatron_gcpo.rollout.build import make_engine
from megatron_gcpo.types import Group, Prompt, Rollout
from megatron_gcpo.verify.pool import VerifierPool


class Draw(Protocol):
    """Groups for these prompts from the engine, with the settings of the run where no others are given."""

    def __call__(
        self, prompts: Sequence[Prompt], step: int, *, turns: Environment | None = ..., **own: Any
    ) -> list[Group]:
        """turns: the conversation that a rollout is, by default the method's; None: one answer. own: as of ``converse``."""
        ...


@dataclass(frozen=True, kw_only=True)
class Leader:
    """What only the leader of a replica holds: everything that sees text."""

    tokenizer: Any
    prompts: PromptSet
    heldout: PromptSet | None
    sampler: Sampler
    judge: Judge | None
    """Asks the policy about candidates, for a sampler that waits for it; None: the sampler needs nobody."""
    engine: RolloutEngine
    rollouts: Rollouts
    """Draws the groups of the steps with ``engine``, maybe ahead of time."""
    draw: Draw
    sampling: Sampling
    pool: VerifierPool
    encoder: Encoder | None
    """None when neither the method nor an evaluation compares rollouts; loading one takes seconds."""
    strategy_of: Labeller | None
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
    environment = method.environment
    frame = checked_frame(turn_frame(config.data, tokenizer), environment, prompts.prompts)

    def draw(
        prompts: Sequence[Prompt], step: int, *, turns: Environment | None = environment, **own: Any
    ) -> list[Group]:
        settings: dict[str, Any] = {
            "group_size": rollout.group_size,
            "max_new_tokens": rollout.max_new_tokens,
            "sampling": sampling,
            "decode": lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            "run_seed": config.run.seed,
        }
        return converse(engine, prompts, turns, frame=frame, step=step, **{**settings, **own})

    def share(step: int, round: int) -> list[Group]:
        return draw([prompts.prompts[i] for i in sampler.share(step, topology.replica, round)], step)

    synchronous = rollout.max_policy_lag == 0 or config.run.stage != "rl"
    return Leader(
        tokenizer=tokenizer,
        prompts=prompts,
        heldout=heldout,
        sampler=sampler,
        judge=_judge(config, topology.replica, prompts, sampler, tokenizer, draw),
        engine=engine,
        rollouts=(
            Synchronous(draw=share)
            if synchronous
            else Background(share, engine, max_lag=rollout.max_policy_lag, num_steps=config.run.steps)
        ),
        draw=draw,
        sampling=sampling,
        pool=VerifierPool(config.verify),
        encoder=Encoder(config.embed, topology.platform.device) if needs & EMBEDDING_NEEDS or heldout else None,
        strategy_of=task_labeller(config.data.train),
    )


def _judge(
    config: Config, replica: int, prompts: PromptSet, sampler: Sampler, tokenizer: Any, draw: Draw
) -> Judge | None:
    """Who asks the policy, where the sampler waits for what it says."""
    if not isinstance(sampler, JudgedSampler) or config.run.stage != "rl":
        return None
    limit = sampler.options.max_new_tokens

    def ask(step: int, questions: Sequence[Prompt]) -> list[Group]:
        return draw(questions, step, turns=None, group_size=1, max_new_tokens=limit, stream="judge")

    return Judge(sampler, prompts.prompts, ask=ask, encode=question_encoder(config.data, tokenizer), replica=replica)

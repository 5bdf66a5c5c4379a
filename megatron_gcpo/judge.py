"""The policy as the judge of prompts: before a step it is asked about candidates, after it its forecasts become rows to train.

Each leader asks its own engine about its share of the candidates. What crosses replicas are numbers: two for each
candidate before the step, two for each prompt after it (data.judged). The questions and answers stay where they were drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from megatron_gcpo.config.records import DataConfig
from megatron_gcpo.credit.tokens import rollout_batch
from megatron_gcpo.data.judged import JudgedSampler, Paid
from megatron_gcpo.data.template import encode_prompts
from megatron_gcpo.environments.forecast import FRAME_TOKENS, question, read
from megatron_gcpo.types import Credit, Group, Prompt, TokenBatch

type Ask = Callable[[int, Sequence[Prompt]], list[Group]]
"""(step, questions) -> one answer of the policy to each."""
type Encode = Callable[[Sequence[str]], list[tuple[int, ...] | str]]
"""Texts -> token ids as the policy sees them, or why there are none."""


class Judge:
    """The forecasts of one replica, step by step."""

    def __init__(
        self, sampler: JudgedSampler, prompts: Sequence[Prompt], *, ask: Ask, encode: Encode, replica: int
    ) -> None:
        """Raises ValueError for a tokenizer that cannot put the question."""
        self.sampler = sampler
        self._prompts, self._ask, self._encode, self._replica = prompts, ask, encode, replica
        self._answers: dict[int, Group] = {}
        check_question(encode, sampler.options.recent)

    def choose(self, step: int, sum_over_replicas: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Forecast this replica's candidates and let the sampler choose the step's prompts. Collective over the leaders."""
        own = self.sampler.share_of_candidates(step, self._replica)
        self._answers = dict(zip(own, self._ask(step, self._questions(own)), strict=True))
        places = {prompt: place for place, prompt in enumerate(self.sampler.candidates(step))}
        forecasts_2C = torch.zeros(2, len(places), dtype=torch.float64)
        for prompt, answer in self._answers.items():
            forecast = read(answer.rollouts[0].text)
            if forecast is not None:
                forecasts_2C[:, places[prompt]] = torch.tensor([forecast, 1.0], dtype=torch.float64)
        self.sampler.choose(step, sum_over_replicas(forecasts_2C).numpy())

    def rows(self, step: int, paid: Paid) -> TokenBatch | None:
        """This replica's answers whose reward is known, paid by their advantages; None where forecasts are not trained."""
        if self.sampler.options.coef == 0:
            return None
        places = {prompt: place for place, prompt in enumerate(self.sampler.candidates(step))}
        known = [p for p in self._answers if not np.isnan(paid.advantages_C[places[p]])]
        answers = [self._answers[prompt] for prompt in known]
        return rollout_batch(answers, [_credit(paid, places[prompt]) for prompt in known])

    def metrics(self, paid: Paid) -> dict[str, float]:
        """What is worth watching of a step's forecasts; the same on every leader."""
        forecasts_C, read_C = self.sampler.forecasts_2C
        seen = {
            "reward": paid.rewards_C,
            "error": paid.errors_C,
            "forecast": np.where(read_C > 0, forecasts_C, np.nan),
            "unreadable_share": 1 - read_C,
        }
        return {name: float(np.nanmean(values_C)) for name, values_C in seen.items() if not np.isnan(values_C).all()}

    def _questions(self, prompts: Sequence[int]) -> list[Prompt]:
        recent = [(self._prompts[prompt].text, variance) for prompt, variance in self.sampler.recent]
        texts = [question(self._prompts[prompt].text, recent) for prompt in prompts]
        return [
            Prompt(id=self._prompts[prompt].id, token_ids=_sound(ids), text=text, answer="")
            for prompt, text, ids in zip(prompts, texts, self._encode(texts), strict=True)
        ]


def question_encoder(data: DataConfig, tokenizer: Any) -> Encode:
    """How questions become tokens: templated as prompts are, without the system prompt, which is about solving problems."""
    own = data.model_copy(update={"system_prompt": None})
    return lambda texts: encode_prompts(texts, own, tokenizer)


def check_question(encode: Encode, recent: int) -> None:
    """Raises ValueError where the tokenizer cannot encode a question, or needs more tokens for it than are planned for."""
    (ids,) = encode([question("", [("", 0.0)] * recent)])
    if len(_sound(ids)) > FRAME_TOKENS:
        raise ValueError(
            f"method.sampler judged: a question has {len(ids)} tokens without its problems, at most {FRAME_TOKENS} are "
            "planned for: lower method.sampler.recent, or use another sampler"
        )


def _sound(ids: tuple[int, ...] | str) -> tuple[int, ...]:
    if isinstance(ids, str):
        raise ValueError(
            f"method.sampler judged asks the policy about its prompts, and the question cannot be put: {ids}; use a tokenizer "
            "of a language model, or sampler: uniform"
        )
    return ids


def _credit(paid: Paid, place: int) -> Credit:
    return Credit(
        credits_G=torch.from_numpy(paid.rewards_C[place : place + 1]),
        advantages_G=torch.from_numpy(paid.advantages_C[place : place + 1]),
    )

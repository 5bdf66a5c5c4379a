"""The histogram of lags counts tokens, over all rollouts and replicas alike."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_gcpo.observe.staleness import staleness
from megatron_gcpo.observe.tally import Tally
from megatron_gcpo.types import Group, Prompt, Rollout


def group(*versions: list[int]) -> Group:
    rollouts = [
        Rollout(
            token_ids=np.arange(len(v)),
            logprobs=np.zeros(len(v), np.float32),
            text="",
            finish_reason="stop",
            versions_T=np.array(v, np.int32),
        )
        for v in versions
    ]
    return Group(prompt=Prompt(id="a", token_ids=(1,), text="", answer=""), rollouts=tuple(rollouts))


def test_shares_of_tokens_by_lag() -> None:
    means = staleness(group([5, 5, 6], [7], [6, 6]), step=7, max_lag=3).means()
    shares = [means[f"lag/share_{lag}"] for lag in range(4)]
    assert shares == pytest.approx([1 / 6, 3 / 6, 2 / 6, 0])
    assert means["lag/mean"] == pytest.approx(7 / 6)
    assert means["lag/mixed_share"] == pytest.approx(1 / 3)


def test_replicas_merge_by_tokens() -> None:
    parts = [staleness(group([4]), step=4, max_lag=1), staleness(group([3, 3, 4]), step=4, max_lag=1)]
    means = Tally().merge(parts).means()
    assert (means["lag/share_0"], means["lag/share_1"]) == (0.5, 0.5)

"""One router's replay by itself; whole models are in tests/dist/test_replay.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_gcpo.policy.replay import UNKNOWN, Replay, _Layer

SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.3], [0.8, 0.2, 0.4, 0.6], [0.3, 0.1, 0.7, 0.2]])
OWN = [[1, 2], [0, 3], [2, 0]]


def top_k(scores: torch.Tensor, k: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.topk(scores, k, dim=1)


def choose(layer: _Layer, scores: torch.Tensor = SCORES) -> tuple[torch.Tensor, list[list[int]]]:
    values, ids = layer.get_replay_topk(scores, 2, None, None, top_k)
    return values, ids.tolist()


def test_known_tokens_follow_the_replay_and_others_their_router() -> None:
    layer, scores = _Layer(0), SCORES.clone().requires_grad_()
    layer.begin(torch.tensor([[3, 0], [UNKNOWN, UNKNOWN], [2, 1]]), training=True)
    values, ids = choose(layer, scores)
    assert ids == [[3, 0], OWN[1], [2, 1]]
    torch.testing.assert_close(values, torch.tensor([[0.3, 0.1], [0.8, 0.6], [0.7, 0.1]]))
    values.sum().backward()
    chosen = torch.zeros(3, 4).scatter(1, torch.tensor(ids), 1.0)
    assert torch.equal(scores.grad, chosen)  # gradients reach the scores of the chosen experts, and of no other
    # of four replayed ids the router would have chosen one: 2, of the last token
    assert layer.take_counts().tolist() == [1, 4]
    assert layer.take_counts().tolist() == [0, 0]


def test_without_routing_the_router_s_own_choice_is_untouched() -> None:
    layer = _Layer(0)
    own_values, own_ids = top_k(SCORES, 2)
    for begin in (False, True):
        if begin:
            layer.begin(None, training=True)
        values, ids = choose(layer)
        assert torch.equal(values, own_values)
        assert ids == own_ids.tolist()
    assert layer.take_counts().tolist() == [0, 0]


def test_passes_without_a_backward_are_neither_counted_nor_kept() -> None:
    layer = _Layer(0)
    layer.begin(torch.tensor(OWN), training=False)
    with torch.no_grad():
        choose(layer)
    assert not layer.waiting
    assert layer.take_counts().tolist() == [0, 0]


def test_recomputed_micro_batches_get_their_own_routing_again() -> None:
    """As in one forward, one backward: two forwards, a recomputation, a third forward, two recomputations."""
    layer = _Layer(0)
    routing = [torch.tensor([[a, b]] * 3) for a, b in ((0, 1), (1, 2), (2, 3))]

    def forward(m: int) -> list[list[int]]:
        layer.begin(routing[m], training=True)
        with torch.no_grad():  # how a checkpoint runs the first time
            ids = choose(layer)[1]
        layer.end()
        return ids

    again = []
    forward(0), forward(1)
    again.append(choose(layer)[1])
    forward(2)
    again += [choose(layer)[1], choose(layer)[1]]
    assert again == [part.tolist() for part in routing]
    assert not layer.waiting
    counted = layer.take_counts()[1]
    assert counted == 3 * 3 * 2  # once for each micro-batch


@pytest.mark.parametrize(
    ("experts", "balancing", "says"),
    [(None, "none", "needs a mixture of experts"), (4, "sinkhorn", "moe_router_load_balancing_type")],
)
def test_policies_that_cannot_replay_are_refused(experts: int | None, balancing: str, says: str) -> None:
    provider = SimpleNamespace(num_moe_experts=experts, moe_router_load_balancing_type=balancing)
    policy: Any = SimpleNamespace(provider=provider, chunks=[])
    with pytest.raises(ValueError, match=says):
        Replay(policy, SimpleNamespace())  # type: ignore[arg-type]

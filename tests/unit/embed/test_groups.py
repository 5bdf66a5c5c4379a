import math

import numpy as np
import pytest
import torch

from megatron_gcpo.embed import cosine_metrics, embed_groups
from megatron_gcpo.types import Group, Prompt, Rollout


class HashEncoder:
    """A unit row per text, the same for the same text; remembers what it was asked."""

    def __init__(self):
        self.calls = []

    def encode(self, texts):
        self.calls.append(list(texts))
        rows = [np.random.default_rng(abs(hash(text))).normal(size=5) for text in texts]
        return torch.nn.functional.normalize(torch.tensor(np.array(rows).reshape(-1, 5), dtype=torch.float32), dim=-1)


def group(*texts):
    rollouts = tuple(
        Rollout(
            token_ids=np.zeros(1, np.int64),
            logprobs=np.zeros(1, np.float32),
            text=text,
            finish_reason="stop",
            versions_T=np.ones(1, np.int32),
        )
        for text in texts
    )
    return Group(prompt=Prompt(id="p", token_ids=(1,), text="", answer=""), rollouts=rollouts)


def test_only_rewarded_rollouts_of_groups_with_two_of_them_are_embedded_in_one_call():
    groups = [group("a", "b", "c"), group("d", "e", "f"), group("g", "h", "i"), group("j", "a", "k")]
    rewards = [np.array([1.0, 0, 0.5]), torch.tensor([0.0, 1, 0]), np.zeros(3), torch.tensor([0.0, 1, -0.5])]
    encoder = HashEncoder()
    embeddings = embed_groups(encoder, groups, rewards, span="completion")
    assert encoder.calls == [["a", "c", "a", "k"]]
    assert embeddings[1] is None
    assert embeddings[2] is None
    rows = encoder.encode(["a", "c", "k"])
    torch.testing.assert_close(embeddings[0], torch.stack([rows[0], torch.zeros(5), rows[1]]))
    torch.testing.assert_close(embeddings[3], torch.stack([torch.zeros(5), rows[0], rows[2]]))


def test_the_span_is_what_is_embedded():
    encoder = HashEncoder()
    embed_groups(encoder, [group("x . answer 1", "y . answer 1")], [np.ones(2)], span="reasoning")
    assert encoder.calls == [["x .", "y ."]]


def test_nothing_rewarded_embeds_nothing():
    encoder = HashEncoder()
    assert embed_groups(encoder, [group("a", "b")], [np.zeros(2)], span="completion") == [None]
    assert embed_groups(encoder, [], [], span="completion") == []
    assert not any(encoder.calls)


def test_rewards_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="'p' has rewards"):
        embed_groups(HashEncoder(), [group("a", "b")], [np.array([1.0, math.nan])], span="completion")


def test_cosine_metrics_of_known_angles():
    """Directions at 0, 60 and 90 degrees, and a zero row that is no rollout: cosines 1/2, 0, cos 30 degrees."""
    s = math.sqrt(3) / 2
    embeddings_GD = torch.tensor([[1.0, 0], [0.5, s], [0, 0], [0, 1]])
    metrics = cosine_metrics([embeddings_GD, None, torch.tensor([[1.0, 0], [1.0, 0]])])
    assert metrics["embed/cosine_mean"] == pytest.approx(((0.5 + 0 + s) / 3 + 1) / 2)
    assert metrics["embed/cosine_max"] == pytest.approx((s + 1) / 2)
    assert cosine_metrics([None]) == {}

import pytest
import torch

from megatron_gcpo.reshard import push


class Export:
    """A collective export: remembers how far it was walked."""

    def __init__(self, num_tensors=4):
        self.walked = 0
        self.num_tensors = num_tensors

    def __iter__(self):
        for n in range(self.num_tensors):
            self.walked += 1
            yield f"w{n}", torch.full((n + 1,), float(n), dtype=torch.bfloat16)


class Engine:
    """Keeps what it is given; with ``fails_after`` it refuses in the middle."""

    control = None

    def __init__(self, fails_after=None):
        self.policy_version = 7
        self.fails_after = fails_after
        self.weights = {}

    def load_weights(self, weights, *, version=None):
        for name, tensor in weights:
            if len(self.weights) == self.fails_after:
                raise ValueError(f"{name!r} has another shape")
            self.weights[name] = tensor
        self.policy_version = self.policy_version + 1 if version is None else version


def test_the_engine_gets_every_tensor_and_a_new_version():
    export, engine = Export(), Engine()
    stats = push(export, engine)
    assert {name: t.tolist() for name, t in engine.weights.items()} == {f"w{n}": [float(n)] * (n + 1) for n in range(4)}
    assert engine.policy_version == 8
    assert (stats.num_tensors, stats.num_bytes) == (4, 2 * (1 + 2 + 3 + 4))


def test_a_resumed_run_sets_the_version():
    engine = Engine()
    push(Export(), engine, version=120)
    assert engine.policy_version == 120


def test_peers_without_an_engine_walk_the_whole_export():
    export = Export()
    stats = push(export, None)
    assert export.walked == stats.num_tensors == 4


def test_when_the_engine_refuses_the_leader_still_walks_the_export_to_its_end():
    """Its peers are inside the collectives of that export: leaving early would hang them."""
    export, engine = Export(), Engine(fails_after=1)
    with pytest.raises(ValueError, match=r"'w1' has another shape.*serves nothing.*model\.hf_config"):
        push(export, engine)
    assert export.walked == 4
    assert engine.policy_version == 7

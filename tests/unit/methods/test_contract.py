"""What every method of the table promises, whatever it computes."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from megatron_gcpo.methods import METHODS, resolve
from megatron_gcpo.methods.table import README, rendered
from tests.unit.methods.world import Taken, World, chosen, make_world, take_step

WORLD = make_world()
ON_POLICY = make_world(drift=0.0)
ROOT = Path(__file__).parents[3]
SAME = {"rtol": 2e-6, "atol": 2e-7}
"""Advantages and weights are float32."""


def world_for(name: str) -> World:
    """On policy for methods whose constants hold there only."""
    method, options = chosen(name)
    return ON_POLICY if method.one_update or any(part.name == "opefo" for part in options.token_credit) else WORLD


@pytest.mark.parametrize("name", METHODS)
def test_order_of_rollouts_in_a_group_does_not_matter(name):
    world = world_for(name)
    orders = [np.random.default_rng(i).permutation(len(r)) for i, r in enumerate(world.rewards)]
    plain, permuted = take_step(name, world), take_step(name, world.permuted(orders))
    torch.testing.assert_close(permuted.gradient, plain.gradient, **SAME)
    assert plain.gradient.abs().max() > 1e-4
    paid = [taken.batch.advantages_T[taken.batch.mask_T > 0].sort().values for taken in (plain, permuted)]
    torch.testing.assert_close(*paid, **SAME)


@pytest.mark.parametrize("name", METHODS)
def test_what_lies_off_the_mask_does_not_matter(name):
    """Prompt tokens may have any statistics; rows without a trained token are padding."""
    world = world_for(name)

    def blemish(batch, stats):
        noise_T = torch.randn(len(batch.mask_T), generator=torch.Generator().manual_seed(1)).double()
        noise_T = torch.where(batch.mask_T > 0, 0, noise_T)
        marred = {
            f: getattr(batch, f) + noise_T
            for f in ("old_logprobs_T", "ref_logprobs_T")
            if getattr(batch, f) is not None
        }
        changed = {f: getattr(stats, f) + noise_T for f in ("logprobs_T", "entropy_T", "sum_p2_T", "sum_p2_logp_T")}
        return replace(batch, **marred), replace(stats, **changed)

    marred = take_step(name, world, blemish=blemish)
    torch.testing.assert_close(marred.gradient, take_step(name, world).gradient, **SAME)


@pytest.mark.parametrize("name", METHODS)
def test_micro_batches_and_packing_do_not_matter(name):
    world = world_for(name)

    def shuffled(batch):
        order = torch.randperm(batch.num_rows, generator=torch.Generator().manual_seed(2)).tolist()
        return [order[:5], [], order[5:6], order[6:]]

    cut = take_step(name, world, micro=shuffled)
    torch.testing.assert_close(cut.gradient, take_step(name, world).gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", METHODS)
def test_replicas_do_not_matter(name):
    """Two replicas with a group and three of them add up to one with all; phase one is alike on both."""
    world = world_for(name)
    whole = take_step(name, world, step=1)
    parts = on_replicas(name, [world.part(slice(0, 1)), world.part(slice(1, 4))], step=1)
    torch.testing.assert_close(parts[0].gradient + parts[1].gradient, whole.gradient, **SAME)
    assert parts[0].states == parts[1].states
    assert parts[0].metrics == parts[1].metrics
    for key, value in whole.metrics.items():
        assert parts[0].metrics[key] == pytest.approx(value, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ["all_wrong", "all_right", "one_token"])
def test_degenerate_groups_stay_finite(name, kind):
    rewards = {"all_wrong": [[0.0] * 4] * 2, "all_right": [[1.0] * 4] * 2, "one_token": [[1, 0, 1, 0], [1, 1, 0, 1]]}
    drift = 0.0 if world_for(name) is ON_POLICY else 0.15
    world = make_world(rewards[kind], drift=drift, lengths=lambda rng: 1 if kind == "one_token" else 4)
    taken = take_step(name, world)
    assert np.isfinite(taken.loss)
    assert torch.isfinite(taken.gradient).all()
    assert all(np.isfinite(value) for value in taken.metrics.values())


@pytest.mark.parametrize("name", METHODS)
def test_a_group_of_one_is_refused_or_finite(name):
    try:
        taken = take_step(name, make_world([[1.0]], drift=0.0))
    except ValueError as error:
        assert "rollout.group_size" in str(error)  # noqa: PT017
    else:
        assert torch.isfinite(taken.gradient).all()


PULLED = {"entropy_bonus", "fg_expo", "rspo", "kl_cov", "ed_grpo", "ed_idpo", "vigor"}
"""Terms that act on every token, whatever the rewards, and a method that reads none."""
FROM_ALL_WRONG = {"gcpo_gold", "dqo"} | PULLED
"""A reference takes a place, or diversity is paid to wrong answers too; every other all-wrong step has no gradient."""
FROM_ALL_RIGHT = {"gcpo", "marginal", "darling", "dqo", "dra_grpo", "unlikeliness", "stepcode"} | PULLED
"""Those that tell right answers apart."""


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("reward", "moving"), [(0.0, FROM_ALL_WRONG), (1.0, FROM_ALL_RIGHT)])
def test_gradient_only_where_there_is_something_to_learn(name, reward, moving):
    drift = 0.0 if world_for(name) is ON_POLICY else 0.15
    taken = take_step(name, make_world([[reward] * 4] * 3, drift=drift, lengths=lambda rng: 4))
    largest = float(taken.gradient.abs().max())
    assert largest > 1e-4 if name in moving else largest < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_prompts_are_never_trained(name):
    taken = take_step(name, world_for(name))
    assert taken.batch.weights_T is not None
    assert (taken.batch.weights_T[taken.batch.mask_T == 0] == 0).all()
    assert (taken.batch.advantages_T[taken.batch.mask_T == 0] == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_same_inputs_same_numbers(name):
    first, second = (take_step(name, world_for(name), step=2) for _ in range(2))
    assert torch.equal(first.gradient, second.gradient)
    assert (first.states, first.metrics) == (second.states, second.metrics)


@pytest.mark.parametrize("name", METHODS)
def test_state_survives_a_checkpoint(name):
    """The second step is the same whether the first one's state was kept or read from JSON; without it, it may differ."""
    world = world_for(name)
    first = take_step(name, world, step=0)
    stored = json.loads(json.dumps(first.states))
    kept, read = (take_step(name, world, step=1, states=s) for s in (first.states, stored))
    assert torch.equal(kept.gradient, read.gradient)
    assert kept.states == read.states


@pytest.mark.parametrize("name", METHODS)
def test_options_survive_a_file(name):
    _, options = chosen(name)
    _, again = resolve({"name": name, **json.loads(json.dumps(options.model_dump(mode="json")))})
    assert again == options
    assert hash(again) == hash(options)


@pytest.mark.parametrize("name", METHODS)
def test_there_is_a_piece_of_configuration(name):
    """It says what differs from the method's defaults, and nothing else."""
    section = yaml.safe_load((ROOT / f"configs/method/{name}.yaml").read_text(encoding="utf-8"))["method"]
    assert section.pop("name") == name
    (_, options), (_, defaults) = resolve({"name": name, **section}), resolve({"name": name})
    for field in section:
        assert getattr(options, field) != getattr(defaults, field), f"{field} is the default"


@pytest.mark.parametrize("name", METHODS)
def test_there_is_a_row_in_the_table(name):
    method = METHODS[name]
    assert f"| `{name}` |" in README.read_text(encoding="utf-8")
    assert method.arxiv in (__import__(f"megatron_gcpo.methods.{name}", fromlist=["x"]).__doc__ or "")
    assert method.summary
    assert method.evidence


def test_the_table_is_the_generated_one():
    assert README.read_text(encoding="utf-8") == rendered(), "run python -m megatron_gcpo.methods.table"


def on_replicas(name: str, parts: list[World], **kwargs) -> list[Taken]:
    """One thread for each replica, meeting at every sum."""
    barrier, box, results = threading.Barrier(len(parts)), [None] * len(parts), [None] * len(parts)

    def work(replica: int) -> None:
        def total(values):
            box[replica] = values
            barrier.wait(10)
            summed = torch.stack(list(box)).sum(0)
            barrier.wait(10)
            return summed

        results[replica] = take_step(name, parts[replica], total=total, **kwargs)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results

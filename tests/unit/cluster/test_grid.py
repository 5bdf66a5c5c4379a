"""The rank grid against its definition, and the advice of validate against brute force."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gcpo.cluster.grid import num_replicas, rank_grid, replica_size, validate
from megatron_gcpo.config.records import ClusterConfig

sizes = st.sampled_from([1, 2, 3, 4])


def cluster(processes: int, tp: int = 1, pp: int = 1, cp: int = 1, **more) -> ClusterConfig:
    return ClusterConfig(
        processes_per_node=processes,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        **more,
    )


@given(tp=sizes, pp=sizes, cp=sizes, dp=sizes, ep=sizes, etp=sizes)
@settings(max_examples=60, deadline=None)
def test_grid_is_a_bijection_and_replicas_partition_it(tp, pp, cp, dp, ep, etp):
    if tp * cp * dp % (ep * etp):
        return
    config = cluster(tp * pp * cp * dp, tp, pp, cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    grid = rank_grid(config)
    dense = [(p.pp, p.dp, p.cp, p.tp) for p in grid]
    assert dense == list(itertools.product(range(pp), range(dp), range(cp), range(tp)))
    experts = [(p.pp, p.edp, p.ep, p.etp) for p in grid]
    assert experts == list(itertools.product(range(pp), range(tp * cp * dp // ep // etp), range(ep), range(etp)))
    for replica in range(dp):
        members = [p for p in grid if p.replica == replica]
        assert len(members) == replica_size(config)
        assert {p.leader for p in members} == {members[0].rank}
        leader = members[0]
        assert (leader.tp, leader.cp, leader.pp) == (0, 0, 0)
        assert [p.is_leader for p in members] == [True] + [False] * (len(members) - 1)


def advised(error: pytest.ExceptionInfo[ValueError]) -> list[int]:
    """The numbers after the last "use" or "is" of a message."""
    tail = re.split(r"\b(?:use|product is|to) ", str(error.value))[-1]
    return [int(n) for n in re.findall(r"\d+", tail)]


@given(heads=st.integers(1, 24), tp=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_advice_for_attention_heads_is_every_size_that_works(heads, tp):
    config = cluster(tp, tp)
    if heads % tp == 0:
        validate(config, num_attention_heads=heads)
        return
    with pytest.raises(ValueError, match=f"{tp} does not divide the {heads} attention heads") as error:
        validate(config, num_attention_heads=heads)
    works = [n for n in range(1, heads + 1) if heads % n == 0]
    assert advised(error) == works[:8]


def test_messages_read_well():
    with pytest.raises(ValueError, match="heads") as error:
        validate(cluster(3, 3), num_attention_heads=4)
    assert str(error.value) == (
        "cluster.tensor_model_parallel_size 3 does not divide the 4 attention heads: use 1, 2 or 4"
    )
    with pytest.raises(ValueError, match="use 1"):
        validate(cluster(2, 2), num_attention_heads=1)


@pytest.mark.parametrize(
    ("config", "model", "message"),
    [
        (cluster(6, 2, 2), {}, r"6 processes .* replicas of 4 .*start a multiple of 4.* is 1, 2, 3 or 6"),
        (
            cluster(6, 6),
            {"num_kv_heads": 4, "num_attention_heads": 12},
            "neither a divisor nor a multiple of the 4",
        ),
        (cluster(3, 1, 3), {"num_layers": 4}, r"pipeline_model_parallel_size 3 does not divide the 4 layers: use 1 "),
        (
            cluster(4, 1, 2, virtual_pipeline_model_parallel_size=2),
            {"num_layers": 6},
            r"2 x virtual_pipeline_model_parallel_size 2 does not divide the 6 layers: use 1 or 2 stages",
        ),
        (
            cluster(2, virtual_pipeline_model_parallel_size=2),
            {},
            "virtual_pipeline_model_parallel_size 2 needs",
        ),
        (cluster(2, sequence_parallel=True), {}, "sequence_parallel"),
        (cluster(4, cp=2, platform="cpu"), {}, "context_parallel_size 2 needs the fused attention"),
        (
            cluster(4, expert_model_parallel_size=4),
            {"num_experts": 6},
            "the 6 experts: use 1, 2, 3 or 6",
        ),
        (cluster(4, expert_model_parallel_size=2), {"num_experts": 0}, "one has none: leave them out"),
        (cluster(6, expert_model_parallel_size=4), {"num_experts": 4}, r"expert parallel 4 .* use .* 1, 2, 3 or 6"),
        (cluster(2, expert_tensor_parallel_size=4), {"num_experts": 4}, "expert_tensor_parallel_size to 1 or 2"),
        (cluster(2, 2), {"num_experts": 4}, "sequence_parallel=true"),
        (
            cluster(8, 2),
            {"prompts_per_step": 10},
            r"rollout.prompts_per_step 10 .* 4 data-.* use 8 or 12",
        ),
        (cluster(8), {"sft_rows_per_step": 3}, r"train.sft_rows_per_step 3 .*use 8"),
        (cluster(2, 2), {"vocab_size": 1}, "vocabulary of 1"),
        (cluster(2, 2), {"ffn_hidden_size": 5}, "hidden units of a feed-forward layer: use 1 or 5"),
    ],
)
def test_impossible_sizes_say_what_would_work(config, model, message):
    with pytest.raises(ValueError, match=message):
        validate(config, **model)


def test_possible_sizes_pass():
    validate(cluster(6, 2), num_attention_heads=4, num_kv_heads=1, num_layers=3, prompts_per_step=6, vocab_size=100)
    validate(
        cluster(8, 2, 2, sequence_parallel=True, expert_model_parallel_size=4, expert_tensor_parallel_size=1),
        num_attention_heads=4,
        num_layers=4,
        num_experts=8,
        moe_ffn_hidden_size=3,
    )
    assert num_replicas(cluster(12, 2, 3)) == 2

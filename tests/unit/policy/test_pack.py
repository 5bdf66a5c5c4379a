from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gcpo.policy.pack import (
    MicroBatch,
    context_parallel_index,
    context_parallel_inverse,
    context_shard,
    gather_tokens,
    micro_batches,
    min_count,
    row_boundaries,
)
from megatron_gcpo.types import TokenBatch


def make_batch(lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    cu = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    mask = (torch.rand(T, generator=g) < 0.7).float()
    mask[cu[:-1]] = 0
    return TokenBatch(
        tokens_T=torch.randint(1, 1000, (T,), generator=g),
        cu_seqlens_N1=cu,
        mask_T=mask,
        advantages_T=torch.randn(T, generator=g) * mask,
        group_N=torch.arange(len(lengths)) // 2,
        old_logprobs_T=torch.randn(T, generator=g),
    )


def model(micro: MicroBatch) -> torch.Tensor:
    """[R, S] a stand-in for log-probs that sees the past of its own sequence, positions and the target."""
    S = micro.tokens_RS.shape[1]
    same_RSS = micro.segment_ids_RS[:, :, None] == micro.segment_ids_RS[:, None, :]
    causal_RSS = same_RSS & torch.ones(S, S, dtype=torch.bool).tril()
    weight_RS = (micro.tokens_RS * (1 + micro.position_ids_RS)).double()
    past_RS = (causal_RSS * weight_RS[:, None, :]).sum(-1)
    return torch.sin(past_RS) + micro.targets_RS.double() / 1000


def oracle(batch: TokenBatch) -> torch.Tensor:
    """[T] the same, one sequence after the other."""
    out = torch.zeros(len(batch.tokens_T), dtype=torch.float64)
    for begin, end in zip(batch.cu_seqlens_N1[:-1].tolist(), batch.cu_seqlens_N1[1:].tolist(), strict=True):
        past = 0.0
        for t in range(begin + 1, end):
            past += float(batch.tokens_T[t - 1] * (t - begin))
            out[t] = torch.sin(torch.tensor(past, dtype=torch.float64)) + batch.tokens_T[t].double() / 1000
    return out


layouts = st.fixed_dictionaries(
    {
        "packing": st.booleans(),
        "rows": st.sampled_from(["many", "one"]),
        "multiples": st.sampled_from([(1, 1), (2, 1), (4, 4), (8, 2)]),
        "slack": st.integers(0, 60),
    }
)


def options_of(layout, lengths):
    pad, sequence = layout["multiples"]
    longest = -(-max(lengths, default=1) // pad) * pad
    return {
        "max_tokens": longest + layout["slack"],
        "packing": layout["packing"],
        "pad_multiple": pad,
        "sequence_multiple": sequence,
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=0, max_size=25), layouts, st.integers(0, 3))
def test_invariants(lengths, layout, extra):
    """Whatever the layout: each token once, inside the budget, and statistics come back where they belong."""
    batch = make_batch(lengths)
    options = options_of(layout, lengths)
    count = min_count(batch, **options) + extra
    parts = micro_batches(batch, **options, rows=layout["rows"], count=count)
    assert len(parts) == count
    taken = torch.cat([part.take_T for part in parts])
    assert torch.equal(taken.sort().values, torch.arange(len(batch.tokens_T)))
    assert sorted(torch.cat([part.rows_N for part in parts]).tolist()) == list(range(len(lengths)))
    for part in parts:
        R, S = part.tokens_RS.shape
        assert part.num_positions <= options["max_tokens"] or not part.num_tokens
        assert S % options["pad_multiple"] == 0
        if layout["packing"]:
            assert (part.start_N % options["sequence_multiple"] == 0).all()
            assert R == 1 or layout["rows"] == "many"
        else:
            assert max(R, 1) == max(part.batch.num_rows, 1)
        assert torch.equal(part.batch.tokens_T, batch.tokens_T[part.take_T])
        assert torch.equal(part.batch.advantages_T, batch.advantages_T[part.take_T])
        assert int((part.segment_ids_RS > 0).sum()) == part.num_tokens
        assert (part.tokens_RS[part.segment_ids_RS == 0] == 0).all()
        has = part.source_RS >= 0
        assert torch.equal(part.targets_RS[has], part.batch.tokens_T[part.source_RS[has]])
        assert (part.targets_RS[~has] == 0).all()
        predicted = torch.bincount(part.source_RS[has], minlength=part.num_tokens)
        first = torch.zeros(part.num_tokens, dtype=torch.bool)
        first[part.batch.cu_seqlens_N1[:-1]] = True
        assert torch.equal(predicted == 1, ~first)  # every token but the first of a sequence, so every trained one
    values_T = gather_tokens(parts, [part.token_values(model(part)) for part in parts])
    torch.testing.assert_close(values_T, oracle(batch), rtol=1e-9, atol=1e-9)


def test_the_same_every_time_and_whatever_the_global_generator():
    batch = make_batch([7, 30, 2, 2, 2, 19, 30, 11])
    torch.manual_seed(1)
    a = micro_batches(batch, max_tokens=40)
    torch.manual_seed(2)
    b = micro_batches(batch, max_tokens=40)
    assert [p.rows_N.tolist() for p in a] == [p.rows_N.tolist() for p in b]
    assert all(torch.equal(x.source_RS, y.source_RS) for x, y in zip(a, b, strict=True))


def useful_share(parts):
    return sum(p.num_tokens for p in parts) / sum(p.num_positions for p in parts)


@pytest.mark.parametrize("max_tokens", [1024, 2048, 8192])
@pytest.mark.parametrize("pad_multiple", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_short_sequences_fill_95_percent_in_short_rows(max_tokens, pad_multiple, seed):
    """128 sequences of 30 to 70 tokens; attention needs R S^2 memory, so rows hold a few sequences, not all."""
    g = torch.Generator().manual_seed(seed)
    batch = make_batch(torch.randint(30, 71, (128,), generator=g).tolist())
    parts = micro_batches(batch, max_tokens=max_tokens, pad_multiple=pad_multiple)
    assert useful_share(parts) >= 0.95
    attention = sum(p.num_positions * p.tokens_RS.shape[1] for p in parts)
    assert attention <= 3 * 70 * sum(p.num_positions for p in parts)


@pytest.mark.parametrize(
    ("multiples", "rows"), [((1, 1), "many"), ((8, 1), "many"), ((8, 1), "one"), ((32, 4), "one"), ((32, 4), "many")]
)
@pytest.mark.parametrize("max_tokens", [8192, 16384])
def test_long_mixed_sequences_fill_95_percent(multiples, rows, max_tokens):
    """256 sequences of 16 to 4096 tokens, lengths spread evenly in the logarithm."""
    g = torch.Generator().manual_seed(7)
    lengths = (16 * 256 ** torch.rand(256, generator=g)).long().clamp(16, 4096).tolist()
    batch = make_batch([*lengths, 16, 4096])
    parts = micro_batches(
        batch, max_tokens=max_tokens, pad_multiple=multiples[0], sequence_multiple=multiples[1], rows=rows
    )
    assert useful_share(parts) >= 0.95
    assert len(parts) <= sum(lengths) / max_tokens / 0.9 + 1


def test_micro_batches_are_balanced():
    g = torch.Generator().manual_seed(8)
    batch = make_batch(torch.randint(16, 500, (200,), generator=g).tolist())
    tokens = [p.num_tokens for p in micro_batches(batch, max_tokens=8192)]
    assert max(tokens) - min(tokens) <= 0.02 * max(tokens)


def test_fewest_micro_batches_where_they_can_be_counted():
    """Sequences above half the budget are alone; two of exactly half share; the rest follows from the sum."""
    assert min_count(make_batch([60] * 5), max_tokens=100) == 5
    assert min_count(make_batch([50] * 6), max_tokens=100) == 3
    assert min_count(make_batch([10] * 95), max_tokens=100) == 10
    assert min_count(make_batch([40] * 7), max_tokens=100) == 4
    assert min_count(make_batch([]), max_tokens=100) == 1
    assert min_count(make_batch([51] * 2000), max_tokens=100) == 2000


def test_without_packing_neighbours_in_length_share():
    """Brute force over all contiguous cuts of the sorted lengths finds neither fewer nor smaller buckets."""
    lengths = [3, 9, 1, 4, 9, 2, 6, 5, 5, 8]
    parts = micro_batches(make_batch(lengths), max_tokens=20, packing=False)
    ordered = sorted(lengths, reverse=True)
    best = {}
    for cuts in range(2 ** (len(lengths) - 1)):
        ends = [i + 1 for i in range(len(lengths) - 1) if cuts >> i & 1]
        pieces = [ordered[a:b] for a, b in zip([0, *ends], [*ends, len(lengths)], strict=True)]
        cost = max(len(piece) * piece[0] for piece in pieces)
        if cost <= 20:
            best[len(pieces)] = min(cost, best.get(len(pieces), 99))
    assert len(parts) == min(best)
    assert max(p.num_positions for p in parts) == best[len(parts)]
    assert all(p.tokens_RS.shape == (p.batch.num_rows, int(p.batch.lengths_N.max())) for p in parts)


def test_spare_micro_batches_are_one_row_of_padding():
    batch = make_batch([5, 6])
    for packing in (True, False):
        parts = micro_batches(batch, max_tokens=32, pad_multiple=4, packing=packing, count=4)
        empty = [p for p in parts if not p.num_tokens]
        assert len(empty) == 2
        assert all(p.tokens_RS.tolist() == [[0] * 4] and p.source_RS.tolist() == [[-1] * 4] for p in empty)
        assert all(p.batch.num_rows == 0 and p.token_values(torch.ones(1, 4)).shape == (0,) for p in empty)
    nobody = micro_batches(make_batch([]), max_tokens=32)
    assert [p.num_tokens for p in nobody] == [0]


def test_more_micro_batches_than_needed_stay_balanced():
    parts = micro_batches(make_batch([10] * 12), max_tokens=120, count=4)
    assert [p.num_tokens for p in parts] == [30] * 4


@pytest.mark.parametrize("packing", [True, False])
def test_a_sequence_above_the_budget_names_the_field(packing):
    batch = make_batch([10, 33, 40])
    with pytest.raises(ValueError, match=r"40, 33 .*train\.max_tokens_per_micro_batch to at least 40"):
        micro_batches(batch, max_tokens=32, pad_multiple=4, packing=packing)
    with pytest.raises(ValueError, match=r"at least 36"):  # 33 fits, but not once padded
        micro_batches(make_batch([33]), max_tokens=33, pad_multiple=4, packing=packing)
    assert len(micro_batches(make_batch([32]), max_tokens=32, pad_multiple=4, packing=packing)) == 1


def test_gradients_reach_exactly_the_positions_that_predict():
    (part,) = micro_batches(make_batch([4, 3]), max_tokens=16, pad_multiple=8)
    values = torch.randn(part.tokens_RS.shape, requires_grad=True)
    weights = torch.arange(1.0, 8)
    (part.token_values(values) * weights).sum().backward()
    expected = torch.where(part.source_RS >= 0, weights[part.source_RS.clamp(min=0)], 0)
    assert torch.equal(values.grad, expected)


def test_moving_takes_everything_along():
    (part,) = micro_batches(make_batch([4, 3]), max_tokens=16)
    moved = part.to("meta")
    for record in (moved, moved.batch):
        values = [getattr(record, f.name) for f in fields(record)]
        assert {v.device.type for v in values if isinstance(v, torch.Tensor)} == {"meta"}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.sampled_from([1, 2, 4]))
def test_context_parallel_index_and_its_inverse(chunks, cp_size):
    """Ranks partition the row, the inverse restores it, and causal attention costs every rank the same."""
    boundaries = [0]
    for c in chunks:
        boundaries.append(boundaries[-1] + 2 * cp_size * c)
    x = torch.randn(boundaries[-1])
    shards = [context_parallel_index(boundaries, cp_size, r) for r in range(cp_size)]
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(boundaries[-1]))
    assert torch.equal(torch.cat([x[i] for i in shards])[context_parallel_inverse(boundaries, cp_size)], x)
    begin = torch.tensor(boundaries[:-1]).repeat_interleave(torch.tensor(boundaries).diff())
    keys = torch.arange(boundaries[-1]) - begin + 1
    assert len({int(keys[i].sum()) for i in shards}) == 1


def test_context_parallel_chunks_by_hand():
    assert context_parallel_index([0, 8, 12], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert context_parallel_index([0, 8, 12], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


def test_context_shards_add_up_to_the_whole():
    batch = make_batch([9, 5, 14, 3])
    (part,) = micro_batches(batch, max_tokens=64, pad_multiple=8, sequence_multiple=4, rows="one")
    boundaries = row_boundaries(part)
    assert boundaries[-1] == part.tokens_RS.shape[1]
    assert len(boundaries) == 5
    values_RS = model(part)
    total = torch.zeros(part.num_tokens, dtype=torch.float64)
    for rank in range(2):
        shard = context_shard(part, boundaries, 2, rank)
        assert shard.tokens_RS.shape == (1, part.tokens_RS.shape[1] // 2)
        total += shard.token_values(values_RS[:, context_parallel_index(boundaries, 2, rank)])
    assert torch.equal(total, part.token_values(values_RS))
    (empty,) = micro_batches(make_batch([]), max_tokens=64, pad_multiple=8, sequence_multiple=4, rows="one")
    assert row_boundaries(empty) == [0, 8]

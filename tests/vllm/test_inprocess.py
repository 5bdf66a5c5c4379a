"""The engine in this process, with a real vLLM: what it draws and scores is what transformers computes."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megatron_gcpo.rollout.engine import Sampling
from tests.vllm.tiny import (
    CONFIGS,
    PROMPTS,
    assert_holds,
    checkpoint,
    of_tokens,
    random_model,
    requests,
    rollout_config,
    true_logprobs,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]
POSITIONS = 300
BLOCK_BYTES = 128 * 2 * 2 * 2 * 32 * 4  # tokens x keys and values x layers x heads x size x float32


def start(family: str, dtype: str = "fp32", **fields):
    from megatron_gcpo.rollout.vllm.inprocess import VllmEngine

    rollout = rollout_config(**fields)
    return VllmEngine(CONFIGS[family], rollout, dtype=dtype, max_positions=POSITIONS, cpu=True)


@pytest.fixture(scope="module")
def engine() -> Iterator:
    """Tied embeddings, float32, and a cache of nine blocks: three of the longest sequences."""
    before = torch.get_rng_state(), random.getstate(), torch.set_num_threads, torch.get_default_dtype()
    engine = start("tied", vllm={"kv_cache_gib": 9.5 * BLOCK_BYTES / 2**30})
    after = torch.get_rng_state(), random.getstate(), torch.set_num_threads, torch.get_default_dtype()
    assert torch.equal(before[0], after[0]), "a start must not move the trainer's random numbers"
    assert before[1:] == after[1:]
    with pytest.raises(ValueError, match="none were loaded yet"):
        engine.generate(requests(), Sampling())
    yield engine
    engine.close()
    with pytest.raises(ValueError, match="was closed"):
        engine.generate(requests(), Sampling())


@pytest.fixture(scope="module")
def model():
    return random_model("tied", 0)


@pytest.fixture
def loaded(engine, model):
    engine.load_weights(checkpoint(model))
    return engine


def test_greedy_and_scores_follow_each_of_three_pushes(engine, model) -> None:
    other, version = random_model("tied", 1), engine.policy_version
    for pushed in (model, other, model):
        engine.load_weights(checkpoint(pushed))
        assert_holds(engine, pushed, 1e-4)
    assert engine.policy_version == version + 3
    engine.load_weights(checkpoint(other), version=40)
    assert_holds(engine, other, 1e-4)
    assert engine.policy_version == 40


def test_logprobs_are_those_of_the_distribution_in_force(loaded, model) -> None:
    for sampling in (
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_k=5),
        Sampling(top_p=0.6),
        Sampling(temperature=0.9, min_p=0.2),
    ):
        for prompt, sample in zip(PROMPTS, loaded.generate(requests(), sampling), strict=True):
            full_TV = true_logprobs(model, prompt, sample.token_ids, sampling.temperature)
            cut_TV = np.stack([cut(row_V, sampling) for row_V in full_TV])
            np.testing.assert_allclose(sample.logprobs, of_tokens(cut_TV, sample.token_ids), atol=1e-4)


def cut(logprobs_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Brute force: only the allowed tokens, renormalised; min_p, then top_k, then top_p."""
    kept = logprobs_V >= logprobs_V.max() + np.log(sampling.min_p) if sampling.min_p else np.ones(len(logprobs_V), bool)
    if sampling.top_k:
        kept &= logprobs_V >= np.sort(logprobs_V)[-sampling.top_k]
    if sampling.top_p < 1:
        order = np.argsort(-logprobs_V)
        mass_before = np.cumsum(np.exp(logprobs_V[order])) - np.exp(logprobs_V[order])
        kept[order[mass_before >= sampling.top_p]] = False
    masked_V = np.where(kept, logprobs_V, -np.inf)
    return masked_V - np.log(np.exp(masked_V).sum())


def test_tokens_are_drawn_with_their_probabilities(loaded, model) -> None:
    """First tokens of 2000 seeds against the model's distribution: every frequency within five standard deviations."""
    n = 2000
    samples = loaded.generate(requests([PROMPTS[0]] * n, new=1), Sampling(temperature=0.8))
    probs_V = np.exp(true_logprobs(model, PROMPTS[0], [0], 0.8)[0])
    counts_V = np.bincount([int(s.token_ids[0]) for s in samples], minlength=60)
    assert (np.abs(counts_V - n * probs_V) <= 5 * np.sqrt(n * probs_V * (1 - probs_V)) + 1).all()


def test_a_seed_draws_the_same_tokens_in_any_company_and_order(loaded) -> None:
    together = loaded.generate(requests(), Sampling())
    alone = [loaded.generate([request], Sampling())[0] for request in requests()]
    backwards = loaded.generate(requests()[::-1], Sampling())[::-1]
    for sample, single, reverse in zip(together, alone, backwards, strict=True):
        np.testing.assert_array_equal(sample.token_ids, single.token_ids)
        np.testing.assert_array_equal(sample.token_ids, reverse.token_ids)
    others = loaded.generate(requests(first_seed=2**63 + 100), Sampling())
    assert any(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(together, others, strict=True))


def test_temperatures_that_vllm_does_not_take_are_refused(loaded) -> None:
    for temperature in (0.001, 2.5):
        with pytest.raises(ValueError, match=r"vLLM takes temperatures from 0.01 to 2.*rollout.temperature"):
            loaded.generate(requests(), Sampling(temperature=temperature))


def test_the_global_generator_is_not_drawn_from(loaded, model) -> None:
    """It belongs to the trainer, whose other ranks host no engine and must stay in step with this one."""
    before = torch.get_rng_state()
    first = loaded.generate(requests(), Sampling(temperature=0.9, top_p=0.8))
    loaded.score([(PROMPTS[0], first[0].token_ids)])
    loaded.load_weights(checkpoint(model))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    again = loaded.generate(requests(), Sampling(temperature=0.9, top_p=0.8))
    assert [s.token_ids.tolist() for s in first] == [s.token_ids.tolist() for s in again]


def test_stop_tokens_end_a_completion_and_are_kept(loaded) -> None:
    free = loaded.generate(requests(), Sampling(top_k=1))
    stop = int(free[0].token_ids[7])
    for whole, sample in zip(free, loaded.generate(requests(), Sampling(top_k=1, stop_token_ids=(stop,))), strict=True):
        hits = np.flatnonzero(whole.token_ids == stop)
        expected = whole.token_ids[: hits[0] + 1] if len(hits) else whole.token_ids
        np.testing.assert_array_equal(sample.token_ids, expected)
        assert sample.finish_reason == ("stop" if len(hits) else "length")
    # the config's end of sequence is an ordinary token unless it is asked for
    drawn = loaded.generate(requests([PROMPTS[0]] * 60, new=90), Sampling(temperature=2.0))
    assert any(1 in sample.token_ids[:-1] for sample in drawn)


def test_more_sequences_than_the_cache_holds_are_all_completed(loaded, model) -> None:
    """Twelve sequences of three blocks each, nine blocks: some wait and some are computed anew; none is lost or wrong."""
    wanted = requests(PROMPTS * 2, new=POSITIONS - 5)
    for request, sample in zip(wanted, loaded.generate(wanted, Sampling()), strict=True):
        assert len(sample.token_ids) == POSITIONS - 5
        truth_TV = true_logprobs(model, request.prompt_token_ids, sample.token_ids)
        np.testing.assert_allclose(sample.logprobs, of_tokens(truth_TV, sample.token_ids), atol=1e-4)


def test_the_longest_sequence_is_scored_and_longer_ones_are_refused(loaded, model) -> None:
    completion = [2 + i % 50 for i in range(POSITIONS - 1)]
    [score] = loaded.score([((7,), completion)], 0.7)
    np.testing.assert_allclose(score, of_tokens(true_logprobs(model, (7,), completion, 0.7), completion), atol=1e-4)
    with pytest.raises(ValueError, match="sequence 0 has 1 tokens and 300 may be generated, but the model holds 300"):
        loaded.score([((7,), [*completion, 3])])
    with pytest.raises(ValueError, match="request 0 has 5 tokens"):
        loaded.generate(requests(new=POSITIONS - 4), Sampling())
    with pytest.raises(ValueError, match="vocabulary is 0 to 59"):
        loaded.generate(requests([(3, 60)]), Sampling())
    assert_holds(loaded, model, 1e-4)


def test_a_failed_load_or_a_refusal_stops_service_until_a_complete_one(loaded, model) -> None:
    tensors = list(checkpoint(model))
    wrong_shape = [(name, t[:1] if "down_proj" in name else t) for name, t in tensors]
    for bad in (
        tensors[:-3],
        [*tensors, ("model.unknown.weight", torch.zeros(3))],
        wrong_shape,
        [*tensors, tensors[4]],
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - each names its own tensor
            loaded.load_weights(iter(bad))
        with pytest.raises(ValueError, match="the weights are unfit: the last load failed"):
            loaded.score([((1,), (2,))])
        loaded.load_weights(checkpoint(model))
        assert_holds(loaded, model, 1e-4)
    loaded.refuse("a check failed")
    with pytest.raises(ValueError, match="unfit: a check failed; push them again"):
        loaded.generate(requests(), Sampling())
    loaded.load_weights(checkpoint(model))
    assert_holds(loaded, model, 1e-4)


def test_asleep_it_does_nothing_and_after_level_2_it_wants_weights(loaded, model) -> None:
    loaded.sleep()
    loaded.sleep()
    for work in (
        lambda: loaded.generate(requests(), Sampling()),
        lambda: loaded.load_weights(checkpoint(model)),
        lambda: loaded.score([((1,), (2,))]),
        lambda: loaded.control.start_weight_update(),
    ):
        with pytest.raises(ValueError, match="sleeps: call wake"):
            work()
    loaded.wake()
    loaded.wake()
    with pytest.raises(ValueError, match="a sleep of level 2 dropped them"):
        loaded.generate(requests(), Sampling())
    loaded.load_weights(checkpoint(model))
    assert_holds(loaded, model, 1e-4)


def test_weights_change_under_way_and_every_token_names_its_own(loaded, model) -> None:
    """A thread draws; between two tokens the weights are exchanged; each part has the log-probs of its own model."""
    other, first = random_model("tied", 1), loaded.policy_version
    wanted, answer = requests(PROMPTS[:3], new=200), []
    loaded.pause()
    thread = threading.Thread(target=lambda: answer.extend(loaded.generate(wanted, Sampling())))
    thread.start()
    for _ in range(30):  # score takes steps for all, also during a pause
        loaded.score([((1,), (2,))])
    loaded.load_weights(checkpoint(other))
    assert not answer
    loaded.resume()
    thread.join(120)
    assert len(answer) == 3
    for request, sample in zip(wanted, answer, strict=True):
        old_T = sample.versions_T == first
        assert set(sample.versions_T.tolist()) == {first, first + 1}
        assert (np.diff(sample.versions_T) >= 0).all()
        for part_T, weights in ((old_T, model), (~old_T, other)):
            truth_TV = true_logprobs(weights, request.prompt_token_ids, sample.token_ids)
            truth_T = of_tokens(truth_TV, sample.token_ids)
            np.testing.assert_allclose(sample.logprobs[part_T], truth_T[part_T], atol=1e-4)


def test_weights_are_not_exchanged_while_tokens_are_drawn(loaded, model) -> None:
    wanted, failed = requests(PROMPTS[:2], new=290), []
    loaded.pause()

    def draw() -> None:
        try:
            loaded.generate(wanted, Sampling())
        except ValueError as error:
            failed.append(str(error))

    thread = threading.Thread(target=draw)
    thread.start()
    while not loaded._llm.llm_engine.has_unfinished_requests():
        thread.join(0.01)
    with pytest.raises(ValueError, match="cannot sleep while it has requests to finish"):
        loaded.sleep()
    loaded.refuse("the trainer says so")  # requests under way end with the reason, none of them half drawn
    loaded.resume()
    thread.join(60)
    assert "the trainer says so" in failed[0]
    assert not loaded._llm.llm_engine.has_unfinished_requests()
    loaded.load_weights(checkpoint(model))
    assert_holds(loaded, model, 1e-4)


def test_untied_in_bf16_and_experts_follow_each_push() -> None:
    for family, dtype, limit, margin in (("untied", "bf16", 5e-2, 5e-2), ("moe", "fp32", 1e-3, 1e-4)):
        engine = start(family, dtype)
        for seed in (0, 1, 0):
            kind = torch.bfloat16 if dtype == "bf16" else torch.float32
            model = random_model(family, seed, kind)
            engine.load_weights(checkpoint(model, kind))
            assert_holds(engine, model, limit, tie_margin=margin)
        engine.close()

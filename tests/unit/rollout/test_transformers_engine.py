import copy

import numpy as np
import pytest
import torch
from transformers import MistralConfig, Qwen3Config

from megatron_gcpo.rollout import transformers_engine
from megatron_gcpo.rollout.engine import SampleRequest, Sampling
from megatron_gcpo.rollout.transformers_engine import TransformersEngine

from .models import CONFIGS, SHAPE, random_model

CPU = torch.device("cpu")
PROMPTS = [(5, 9, 3), (12, 4, 4, 33, 21, 8), (7,), (5, 9, 3, 40)]


def new_engine(family, max_batch_rows=64, dtype=torch.float32):
    return TransformersEngine(CONFIGS[family], device=CPU, dtype=dtype, max_batch_rows=max_batch_rows)


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request):
    """A model and an engine that got its weights under the names of its checkpoint."""
    model = random_model(request.param)
    engine = new_engine(request.param)
    engine.load_weights(checkpoint(model).items())
    return model, engine


@pytest.fixture(scope="module")
def qwen3():
    model, engine = random_model("qwen3"), new_engine("qwen3")
    engine.load_weights(checkpoint(model).items())
    return model, engine


def checkpoint(model):
    """What save_pretrained writes, read back: the oracle for names, shapes and values of a checkpoint."""
    import tempfile
    from pathlib import Path

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}


def requests(prompts, samples=1, max_new_tokens=20):
    return [
        SampleRequest(prompt_token_ids=prompt, seed=1000 * p + s, max_new_tokens=max_new_tokens)
        for p, prompt in enumerate(prompts)
        for s in range(samples)
    ]


@torch.no_grad()
def full_forward_logprobs(model, prompt, completion, temperature=1.0):
    ids = torch.tensor([[*prompt, *completion]])
    logprobs = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0].numpy()


def test_greedy_tokens_are_those_of_transformers_generate(pair):
    model, engine = pair
    samples = engine.generate(requests(PROMPTS), Sampling(top_k=1, stop_token_ids=(1,)))
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, len(prompt) :]
        assert sample.token_ids.tolist() == expected.tolist()
        assert sample.finish_reason == ("stop" if expected[-1] == 1 else "length")
        np.testing.assert_allclose(sample.logprobs, 0.0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_a_full_forward_pass(pair, temperature):
    model, engine = pair
    wanted = requests(PROMPTS, samples=6)
    samples = engine.generate(wanted, Sampling(temperature=temperature, stop_token_ids=(1, 2, 3)))
    sequences = [(r.prompt_token_ids, s.token_ids.tolist()) for r, s in zip(wanted, samples, strict=True)]
    assert len({len(completion) for _, completion in sequences}) > 3  # rows left the batch at different times
    scores = engine.score(sequences, temperature)
    for (prompt, completion), sample, score in zip(sequences, samples, scores, strict=True):
        expected = full_forward_logprobs(model, prompt, completion, temperature)
        assert sample.logprobs.dtype == score.dtype == np.float32
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)
        np.testing.assert_allclose(score, expected, atol=1e-5)


def test_a_sample_depends_on_its_own_seed_and_prompt_only(qwen3):
    model, engine = qwen3
    wanted = requests(PROMPTS, samples=4)
    sampling = Sampling(stop_token_ids=(1, 2))
    together = engine.generate(wanted, sampling)
    assert len({tuple(s.token_ids) for s in together[:4]}) == 4
    few_rows = new_engine("qwen3", max_batch_rows=3)
    few_rows.load_weights(checkpoint(model).items())
    for other in (few_rows.generate(wanted, sampling), engine.generate(wanted[::-1], sampling)[::-1]):
        assert [s.token_ids.tolist() for s in other] == [s.token_ids.tolist() for s in together]
    alone = engine.generate([wanted[9]], sampling)[0]
    assert alone.token_ids.tolist() == together[9].token_ids.tolist()
    np.testing.assert_allclose(alone.logprobs, together[9].logprobs, atol=1e-5)


def test_samples_follow_the_models_distribution(qwen3):
    """Of 4000 first tokens, a frequency is within 5 standard errors of its probability."""
    model, engine = qwen3
    many = [SampleRequest(prompt_token_ids=PROMPTS[0], seed=s, max_new_tokens=1) for s in range(4000)]
    tokens = np.array([s.token_ids[0] for s in engine.generate(many, Sampling(temperature=2.0))])
    with torch.no_grad():
        probs = (model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1] / 2.0).softmax(-1).numpy()
    frequencies = np.bincount(tokens, minlength=len(probs)) / len(tokens)
    assert (np.abs(frequencies - probs) <= 5 * np.sqrt(probs * (1 - probs) / len(tokens)) + 1e-9).all()


def test_scoring_in_chunks_changes_nothing(qwen3, monkeypatch):
    _, engine = qwen3
    sequences = [((5, 9, 3), (4, 4, 9, 30, 2)), ((8,), (7, 7)), ((3, 3), ())]
    whole = engine.score(sequences)
    monkeypatch.setattr(transformers_engine, "SCORE_CHUNK_TOKENS", 1)
    monkeypatch.setattr(transformers_engine, "SCORE_LOGITS", 2 * 60)  # two rows at once, one token of each
    for a, b in zip(whole, engine.score(sequences), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert [len(a) for a in whole] == [5, 2, 0]


def test_each_request_keeps_its_own_limit_and_padding_is_an_ordinary_token(qwen3):
    _, engine = qwen3
    wanted = [SampleRequest(prompt_token_ids=p, seed=n, max_new_tokens=3 + 7 * n) for n, p in enumerate(PROMPTS)]
    samples = engine.generate(wanted, Sampling(temperature=4.0))
    assert [len(s.token_ids) for s in samples] == [3, 10, 17, 24]
    assert {s.finish_reason for s in samples} == {"length"}
    many = [SampleRequest(prompt_token_ids=(5,), seed=n, max_new_tokens=40) for n in range(20)]
    assert any(0 in s.token_ids[:-1] for s in engine.generate(many, Sampling(temperature=4.0)))


def test_no_requests_give_no_samples(qwen3):
    assert qwen3[1].generate([], Sampling()) == []
    assert qwen3[1].score([]) == []


def test_too_long_requests_are_refused_before_generating(qwen3):
    _, engine = qwen3
    bad = SampleRequest(prompt_token_ids=(3,) * 90, seed=0, max_new_tokens=7)
    with pytest.raises(ValueError, match=r"request 1 has 90 tokens and 7 .* 96 positions.*max_new_tokens to 6"):
        engine.generate([SampleRequest(prompt_token_ids=(3,), seed=0, max_new_tokens=7), bad], Sampling())
    with pytest.raises(ValueError, match="sequence 0 has 90 tokens"):
        engine.score([((3,) * 90, (3,) * 7)])


def test_bf16_engine_scores_close_to_fp32():
    model, engine = random_model("qwen3"), new_engine("qwen3", dtype=torch.bfloat16)
    engine.load_weights(model.state_dict().items())
    sequences = [((5, 9, 3), (4, 4, 9, 30, 2))]
    expected = full_forward_logprobs(copy.deepcopy(model).bfloat16().float(), *sequences[0])
    np.testing.assert_allclose(engine.score(sequences)[0], expected, atol=0.3)


def test_construction_leaves_config_and_random_state_alone():
    config = Qwen3Config(**SHAPE, head_dim=32)
    before, state = config.to_dict(), torch.get_rng_state()
    TransformersEngine(config, device=CPU, dtype=torch.bfloat16, max_batch_rows=4)
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=0),
        MistralConfig(**SHAPE, sliding_window=8),
    ],
)
def test_sliding_windows_are_refused(config):
    with pytest.raises(ValueError, match="sliding_attention"):
        TransformersEngine(config, device=CPU, dtype=torch.float32, max_batch_rows=4)


def test_sleep_refuses_work_until_wake(qwen3):
    _, engine = qwen3
    before = engine.score([((5,), (4,))])
    engine.sleep()
    with pytest.raises(ValueError, match="sleeps"):
        engine.score([((5,), (4,))])
    with pytest.raises(ValueError, match="sleeps"):
        engine.load_weights([])
    engine.wake()
    np.testing.assert_array_equal(engine.score([((5,), (4,))])[0], before[0])

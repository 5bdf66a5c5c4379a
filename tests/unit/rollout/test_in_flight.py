"""Weights that change while the embedded engine draws: each token belongs to the weights it says it was drawn from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from megatron_gcpo.rollout import transformers_engine
from megatron_gcpo.rollout.engine import SampleRequest, Sampling
from megatron_gcpo.rollout.sampling import UniformStreams, draw
from megatron_gcpo.rollout.transformers_engine import TransformersEngine
from tests.unit.rollout.models import CONFIGS, random_model
from tests.unit.rollout.test_transformers_engine import checkpoint, full_forward_logprobs

CPU = torch.device("cpu")
PROMPTS = ((5, 9, 3), (8, 2, 6, 4, 7, 11), (30,), (12, 13, 14, 15))
SAMPLING = Sampling(temperature=1.5, stop_token_ids=(1, 2, 3, 4))
MAX_NEW = 14


def engine_of(family: str, **options: Any) -> TransformersEngine:
    return TransformersEngine(CONFIGS[family], device=CPU, dtype=torch.float32, **{"max_batch_rows": 64, **options})


def requests(samples: int = 3) -> list[SampleRequest]:
    return [
        SampleRequest(prompt_token_ids=prompt, seed=100 * p + s, max_new_tokens=MAX_NEW - s)
        for p, prompt in enumerate(PROMPTS)
        for s in range(samples)
    ]


@contextmanager
def halted(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[Callable[[], Any]]:
    """Inside, a thread that generates ``requests()`` is paused after ``after`` calls that drew a token each.

    What is yielded returns its samples, or raises its error, once the engine was resumed.
    """
    reached, go_on, calls, result = threading.Event(), threading.Event(), [], []

    def counted(*arguments: torch.Tensor) -> Any:
        calls.append(1)
        if len(calls) == after:
            reached.set()
            assert go_on.wait(60)
        return draw(*arguments)

    def work() -> None:
        try:
            result.append(engine.generate(requests(), SAMPLING))
        except ValueError as error:
            result.append(error)

    monkeypatch.setattr(transformers_engine, "draw", counted)
    drawing = threading.Thread(target=work, daemon=True)
    drawing.start()
    assert reached.wait(60)
    pausing = threading.Thread(target=engine.pause, daemon=True)
    pausing.start()
    while not engine._gate._paused:
        pass
    assert pausing.is_alive()  # a token is being drawn
    go_on.set()
    pausing.join(60)
    assert len(calls) == after

    def finish() -> Any:
        drawing.join(60)
        assert not drawing.is_alive()
        if isinstance(result[0], ValueError):
            raise result[0]
        return result[0]

    yield finish
    engine.resume()


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("after", [1, 6])
def test_each_token_has_the_log_prob_of_the_weights_that_drew_it(
    family: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against whole forward passes of both models; the uniform numbers go on where they were."""
    first, second = random_model(family, seed=0), random_model(family, seed=1)
    engine = engine_of(family)
    engine.load_weights(checkpoint(first).items(), version=7)
    if after > 1:
        monkeypatch.setattr(transformers_engine, "MASK_ELEMENTS", 40)  # prefixes in several passes
    with halted(engine, monkeypatch, after) as finish:
        engine.load_weights(checkpoint(second).items(), version=8)
        scored = engine.score([((5, 9, 3), (4, 9))], SAMPLING.temperature)[0]
        np.testing.assert_allclose(scored, full_forward_logprobs(second, (5, 9, 3), (4, 9), 1.5), atol=1e-5)
        engine.resume()
        samples = finish()
    lengths = {len(sample.token_ids) for sample in samples}
    assert min(lengths) <= after or after == 1
    assert max(lengths) > after + 1
    for request, sample in zip(requests(), samples, strict=True):
        size = len(sample.token_ids)
        assert sample.versions_T.dtype == np.int32
        assert sample.versions_T.tolist() == [7] * min(size, after) + [8] * max(0, size - after)
        uniforms = UniformStreams([request.seed], CPU)
        completion = sample.token_ids.tolist()
        for t in range(size):
            model = first if t < after else second
            ids = torch.tensor([[*request.prompt_token_ids, *completion[:t]]])
            with torch.no_grad():
                logprobs_1V = (model(input_ids=ids).logits[:, -1] / 1.5).log_softmax(-1)
            token_1, logprob_1 = draw(logprobs_1V, uniforms.at(t, torch.tensor([0])))
            assert int(token_1) == completion[t]
            assert float(logprob_1) == pytest.approx(float(sample.logprobs[t]), abs=1e-5)


def test_a_pause_alone_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("qwen3")
    engine.load_weights(checkpoint(random_model("qwen3")).items())
    alone = engine.generate(requests(), SAMPLING)
    with halted(engine, monkeypatch, 4) as finish:
        engine.resume()
        for one, other in zip(alone, finish(), strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
            np.testing.assert_array_equal(one.versions_T, other.versions_T)


def test_later_rounds_of_a_call_begin_with_the_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("qwen3", max_batch_rows=6)
    engine.load_weights(checkpoint(random_model("qwen3")).items())
    with halted(engine, monkeypatch, 3) as finish:
        engine.load_weights(checkpoint(random_model("qwen3", seed=1)).items())
        engine.resume()
        versions = [sample.versions_T.tolist() for sample in finish()]
    assert sum(1 in v for v in versions) == 6
    assert sum(v == [2] * len(v) for v in versions) == 6


def test_a_load_without_a_pause_waits_for_the_token_being_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a token are of one version, whatever the timing."""
    models = [random_model("qwen3", seed=s) for s in (0, 1)]
    engine = engine_of("qwen3")
    engine.load_weights(checkpoint(models[0]).items())
    result: list[Any] = []
    begun = threading.Event()

    def noticed(*arguments: torch.Tensor) -> Any:
        begun.set()
        return draw(*arguments)

    monkeypatch.setattr(transformers_engine, "draw", noticed)
    drawing = threading.Thread(target=lambda: result.append(engine.generate(requests(8), SAMPLING)))
    drawing.start()
    assert begun.wait(60)
    for push in range(1, 4):
        engine.load_weights(checkpoint(models[push % 2]).items())
    drawing.join()
    for request, sample in zip(requests(8), result[0], strict=True):
        by_model = [full_forward_logprobs(m, request.prompt_token_ids, sample.token_ids.tolist(), 1.5) for m in models]
        expected = np.where(sample.versions_T % 2, *by_model)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)
        assert (np.diff(sample.versions_T) >= 0).all()


def test_a_failed_load_ends_what_was_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("qwen3")
    engine.load_weights(checkpoint(random_model("qwen3")).items())
    with halted(engine, monkeypatch, 2) as finish:
        with pytest.raises(ValueError, match="is no tensor of"):
            engine.load_weights([("nonsense", torch.zeros(1))])
        engine.resume()
        with pytest.raises(ValueError, match="serves nothing, the weights are unfit: the last load failed"):
            finish()
    engine.load_weights(checkpoint(random_model("qwen3")).items())
    assert engine.generate(requests(1), SAMPLING)

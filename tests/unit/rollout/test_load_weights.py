import numpy as np
import pytest
import torch

from megatron_gcpo.rollout.engine import SampleRequest, Sampling
from megatron_gcpo.rollout.hf_weights import checkpoint_slots
from megatron_gcpo.rollout.transformers_engine import TransformersEngine

from .models import CONFIGS, random_model
from .test_transformers_engine import checkpoint, full_forward_logprobs

SEQUENCE = ((5, 9, 3), (4, 4, 9, 30, 2))
REQUEST = SampleRequest(prompt_token_ids=(5, 9), seed=1, max_new_tokens=2)


def new_engine(family="qwen3"):
    return TransformersEngine(CONFIGS[family], device=torch.device("cpu"), dtype=torch.float32, max_batch_rows=8)


@pytest.mark.parametrize("family", list(CONFIGS))
def test_slots_name_exactly_the_tensors_of_a_checkpoint(family):
    model = random_model(family)
    saved = checkpoint(model)
    slots = checkpoint_slots(model)
    tied = {"lm_head.weight"} if CONFIGS[family].tie_word_embeddings else set()
    assert set(slots) - tied == set(saved)
    assert {name: slots[name].shape for name in saved} == {name: tuple(t.shape) for name, t in saved.items()}


@pytest.mark.parametrize("family", list(CONFIGS))
def test_alternating_pushes_serve_exactly_the_last_one(family):
    engine = new_engine(family)
    models = [random_model(family, seed) for seed in (1, 2)]
    for push, model in enumerate([*models, models[0]], start=1):
        engine.load_weights(checkpoint(model).items())
        assert engine.policy_version == push
        np.testing.assert_allclose(engine.score([SEQUENCE])[0], full_forward_logprobs(model, *SEQUENCE), atol=1e-5)


def broken(change):
    weights = dict(checkpoint(random_model("qwen3", 1)))
    change(weights)
    return weights.items()


def interrupted():
    yield from list(checkpoint(random_model("qwen3", 1)).items())[:4]
    raise RuntimeError("the exporter died")


NORM = "model.norm.weight"
FAILURES = {
    "missing": (lambda: broken(lambda w: w.pop(NORM)), ValueError, r"1 tensors did not arrive.*model\.norm\.weight"),
    "unknown": (
        lambda: broken(lambda w: w.update({"model.extra": torch.zeros(1)})),
        ValueError,
        "model.extra.*no tensor",
    ),
    "shape": (lambda: broken(lambda w: w.update({NORM: torch.zeros(63)})), ValueError, r"\(63,\).*\(64,\)"),
    "twice": (lambda: [*broken(lambda w: None), (NORM, torch.zeros(64))], ValueError, "sent twice"),
    "tied": (
        lambda: broken(lambda w: w.update({"lm_head.weight": torch.zeros(60, 64)})),
        ValueError,
        "to which it is tied",
    ),
    "interrupted": (interrupted, RuntimeError, "the exporter died"),
}


@pytest.mark.parametrize("failure", list(FAILURES))
def test_a_failed_push_serves_nothing_until_a_complete_one(failure):
    weights, error, message = FAILURES[failure]
    engine = new_engine()
    old = random_model("qwen3", 0)
    engine.load_weights(checkpoint(old).items())
    with pytest.raises(error, match=message):
        engine.load_weights(weights())
    with pytest.raises(ValueError, match="unfit"):
        engine.generate([REQUEST], Sampling())
    with pytest.raises(ValueError, match="unfit"):
        engine.score([SEQUENCE])
    assert engine.policy_version == 1

    engine.load_weights(checkpoint(old).items(), version=41)
    assert engine.policy_version == 41
    assert engine.generate([REQUEST], Sampling())[0].versions_T.tolist()[0] == 41
    np.testing.assert_allclose(engine.score([SEQUENCE])[0], full_forward_logprobs(old, *SEQUENCE), atol=1e-5)


def test_nothing_is_served_before_the_first_push_nor_after_refuse():
    engine = new_engine()
    with pytest.raises(ValueError, match="none were loaded yet"):
        engine.generate([REQUEST], Sampling())
    engine.load_weights(random_model("qwen3").state_dict().items())  # holds the tied name twice, equal
    engine.refuse("they smell of burning")
    with pytest.raises(ValueError, match="they smell of burning"):
        engine.score([SEQUENCE])

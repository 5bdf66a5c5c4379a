import pytest
import torch

from megatron_gcpo.config.records import EmbedConfig
from megatron_gcpo.embed import Encoder
from megatron_gcpo.embed.sentence_model import SentenceModel, load_model, packaged_minilm

CPU = torch.device("cpu")
TEXTS = [
    "split both into tens and ones : 2 0 + 3 0 = 5 0",
    "count up",
    "",
    "write them in columns : right 3 + 4 = 7 , keep 7 carry 0",
    "count up " * 200,
    "count up",
]


@pytest.fixture(scope="module")
def reference():
    """sentence-transformers' own encode: the oracle."""
    model = load_model("minilm", CPU)
    return lambda texts: torch.tensor(model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False))


@pytest.fixture(scope="module")
def encoder():
    return Encoder(EmbedConfig(batch_size=2), CPU)


def test_rows_are_those_of_encode_in_the_order_of_the_texts(encoder, reference):
    rows_ND = encoder.encode(TEXTS)
    assert rows_ND.shape == (6, 384)
    assert rows_ND.dtype == torch.float32
    torch.testing.assert_close(rows_ND, reference(TEXTS), atol=2e-6, rtol=0)
    torch.testing.assert_close(rows_ND.norm(dim=-1), torch.ones(6), atol=1e-6, rtol=0)
    metrics = encoder.take_metrics()
    assert metrics == {
        "embed/texts": 5.0,
        "embed/encoded": 5.0,
        "embed/cache_hit_rate": 0.0,
        "embed/truncation_rate": pytest.approx(1 / 5),
    }


def test_a_text_is_encoded_once_and_metrics_start_anew(encoder):
    encoder.encode(TEXTS)
    encoder.take_metrics()
    again = encoder.encode([*TEXTS, "new"])
    metrics = encoder.take_metrics()
    assert (metrics["embed/texts"], metrics["embed/encoded"]) == (6.0, 1.0)
    assert metrics["embed/cache_hit_rate"] == pytest.approx(5 / 6)
    assert metrics["embed/truncation_rate"] == pytest.approx(1 / 6)
    torch.testing.assert_close(again[:6], encoder.encode(TEXTS), atol=0, rtol=0)
    encoder.take_metrics()
    assert encoder.take_metrics()["embed/texts"] == 0.0


def test_max_tokens_cuts_and_counts(reference):
    short = Encoder(EmbedConfig(max_tokens=6), CPU)  # [CLS] a b c d [SEP]
    rows_ND = short.encode(["one two three four", "one two three four five", "one two three four six"])
    torch.testing.assert_close(rows_ND[0], reference(["one two three four"])[0], atol=2e-6, rtol=0)
    torch.testing.assert_close(rows_ND[1], rows_ND[2], atol=2e-6, rtol=0)
    assert short.take_metrics()["embed/truncation_rate"] == pytest.approx(2 / 3)


def test_bf16_keeps_unit_rows_near_those_of_fp32(encoder):
    half = Encoder(EmbedConfig(dtype="bf16"), CPU)
    rows_ND = half.encode(TEXTS)
    assert rows_ND.dtype == torch.float32
    torch.testing.assert_close(rows_ND.norm(dim=-1), torch.ones(6), atol=1e-6, rtol=0)
    assert (rows_ND * encoder.encode(TEXTS)).sum(-1).min() > 0.999


def test_max_tokens_beyond_the_encoder_is_refused():
    with pytest.raises(ValueError, match=r"max_tokens is 513.*lower embed\.max_tokens to 512"):
        Encoder(EmbedConfig(max_tokens=513), CPU)


@pytest.mark.parametrize("name", ["/no/such/folder", "./neither/this"])
def test_a_missing_folder_is_refused_with_its_name(name):
    with pytest.raises(ValueError, match=f"embed.encoder is the folder '{name}', which does not exist"):
        Encoder(EmbedConfig(encoder=name), CPU)


def test_a_folder_without_a_model_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"could not be loaded.*Without network.*minilm"):
        Encoder(EmbedConfig(encoder=str(tmp_path)), CPU)


def test_a_folder_is_an_encoder(reference):
    by_path = Encoder(EmbedConfig(encoder=packaged_minilm()), CPU)
    torch.testing.assert_close(by_path.encode(TEXTS[:2]), reference(TEXTS[:2]), atol=2e-6, rtol=0)


def count_encoded(monkeypatch, row_of):
    """Replaces the model by ``row_of``; returns the list of texts that reach it."""
    seen = []

    def encode(self, texts):
        seen.extend(texts)
        return torch.stack([row_of(text) for text in texts]), [False] * len(texts)

    monkeypatch.setattr(SentenceModel, "__init__", lambda self, config, device: None)
    monkeypatch.setattr(SentenceModel, "encode", encode)
    return seen


def test_the_least_recently_used_texts_leave_the_cache(monkeypatch):
    seen = count_encoded(monkeypatch, lambda text: torch.tensor([float(ord(text))]))
    encoder = Encoder(EmbedConfig(cache_entries=2), CPU)
    for texts in ("ab", "a", "c", "a", "b"):  # c pushes b out, because a was used since
        assert encoder.encode(list(texts)).flatten().tolist() == [float(ord(t)) for t in texts]
    assert "".join(seen) == "abcb"


def test_more_texts_than_the_cache_holds_are_still_encoded_once_per_call(monkeypatch):
    seen = count_encoded(monkeypatch, lambda text: torch.tensor([float(ord(text))]))
    encoder = Encoder(EmbedConfig(cache_entries=0), CPU)
    assert encoder.encode(list("abcab")).flatten().tolist() == [97, 98, 99, 97, 98]
    assert "".join(seen) == "abc"


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_embeddings_without_a_direction_are_refused(value):
    model = SentenceModel(EmbedConfig(), CPU)
    broken = torch.full((1, 384), value)
    model._model.register_forward_hook(lambda module, inputs, outputs: outputs | {"sentence_embedding": broken})
    with pytest.raises(ValueError, match=r"'minilm' gave 1 of 1 texts an embedding of norm .*'some text'"):
        model.encode(["some text"])

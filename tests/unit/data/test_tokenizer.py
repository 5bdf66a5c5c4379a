import json

import pytest
from transformers import AutoTokenizer

from megatron_gcpo.config.records import ModelConfig, SourceConfig
from megatron_gcpo.data import TASKS, build_task_tokenizer, load_tokenizer, make_task

NAMES = sorted(TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_every_demonstration_survives_the_round_trip(name, tmp_path):
    """encode then decode is the identity, one token per word, also after saving and loading as a HF folder."""
    task = make_task(name)
    tokenizer = build_task_tokenizer(task)
    texts = [task.prompt_text(p) for p in task.problems()]
    texts += [d.text for p in task.problems() for d in task.demonstrations(p)]
    backend = tokenizer.backend_tokenizer
    ids = [encoding.ids for encoding in backend.encode_batch(texts)]
    assert [len(row) for row in ids] == [len(text.split()) for text in texts]
    assert backend.decode_batch([[*row, 1] for row in ids], skip_special_tokens=True) == texts
    assert {token for row in ids for token in row} == set(range(2, len(tokenizer)))

    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path)))
    stride = max(1, len(texts) // 500)
    for made in (tokenizer, loaded):
        assert made(texts[::stride])["input_ids"] == ids[::stride]
        assert made.batch_decode([[*row, 1, 0] for row in ids[::stride]], skip_special_tokens=True) == texts[::stride]


def test_ids_are_pinned():
    """A checkpoint is useless under another numbering."""
    tokenizer = build_task_tokenizer(TASKS["addition"])
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 59)
    assert tokenizer("what is 2 7 + 4 5 ?")["input_ids"] == [19, 20, 4, 9, 12, 6, 7, 15]
    assert tokenizer.convert_tokens_to_ids("now") == 58


def test_a_word_outside_the_vocabulary_is_an_error():
    with pytest.raises(Exception, match="UNK"):
        build_task_tokenizer(TASKS["addition"])("what is a cat ?")


def test_task_tokenizer_comes_with_its_source():
    model = ModelConfig(hf_config={"model_type": "qwen3"}, tokenizer="task")
    options = {"weights": {"split": 2}, "heldout": 9}
    plain = load_tokenizer(model, SourceConfig(kind="task", name="countdown"))
    same = load_tokenizer(model, SourceConfig(kind="task", name="countdown", split="sft", options={"numbers": 4}))
    assert plain.get_vocab() == same.get_vocab() == build_task_tokenizer(make_task("countdown")).get_vocab()
    assert load_tokenizer(model, SourceConfig(kind="task", name="addition", options=options)).eos_token == "<eos>"


def test_padding_falls_back_to_the_end_token(tmp_path):
    build_task_tokenizer(TASKS["addition"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token is None
    assert load_tokenizer(ModelConfig(path=str(tmp_path))).pad_token == "<eos>"


def broken(folder, name):
    build_task_tokenizer(TASKS["addition"]).save_pretrained(folder / name)
    return folder / name


def test_errors_say_what_to_set(tmp_path, monkeypatch):
    def message(source=None, **fields):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at the message
            load_tokenizer(ModelConfig(**fields), source)
        return str(caught.value)

    assert "set model.tokenizer" in message()
    assert "needs data.train.kind: task, got no source" in message(tokenizer="task")
    assert "got kind jsonl" in message(SourceConfig(kind="jsonl", path="x"), tokenizer="task")
    natural = SourceConfig(kind="task", name="addition", options={"style": "natural"})
    assert "drop data.train.options.style" in message(natural, tokenizer="task")
    assert "no task 'adition'" in message(SourceConfig(kind="task", name="adition"), tokenizer="task")
    assert "there is no tokenizer folder" in message(path=str(tmp_path / "nowhere"))
    assert "tokenizer.json" in message(path=str(tmp_path))

    torn = broken(tmp_path, "torn")
    (torn / "tokenizer.json").write_text("{torn")
    assert "cannot load a tokenizer from the folder" in message(tokenizer=str(torn))
    assert "is a file" in message(tokenizer=str(torn / "tokenizer.json"))

    endless = broken(tmp_path, "endless")
    config = json.loads((endless / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (endless / "tokenizer_config.json").write_text(json.dumps(config))
    assert "no end-of-sequence token" in message(tokenizer=str(endless))

    def unreachable(name, **options):
        assert options == {"trust_remote_code": False}
        raise OSError("We couldn't connect to the hub\nand so on")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    assert "hub id (no such folder here) some/model: We couldn't connect to the hub" in message(path="some/model")

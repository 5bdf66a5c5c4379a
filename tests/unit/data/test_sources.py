import json
import pickle
import subprocess
import sys
import types

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_gcpo.config.records import DataConfig, SourceConfig
from megatron_gcpo.data import build_task_tokenizer, load_prompts, make_task

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'boom' %}{{ raise_exception('no booms') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte: ids tell the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<pad>", "<eos>", "<bos>"])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")
    made.chat_template = CHAT_TEMPLATE
    return made


def text_of(prompt):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return decoders.ByteLevel().decode([alphabet[i] for i in prompt.token_ids])


def load(tokenizer, source, **data):
    source = SourceConfig(**source)
    return load_prompts(source, DataConfig(train=source, **{"template": "plain", **data}), tokenizer)


def error_of(tokenizer, source, **data):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at the message
        load(tokenizer, source, **data)
    return str(caught.value)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"kind": "jsonl", "path": str(path)}


ROWS = [
    {"prompt": "one?", "answer": 1, "level": 3},
    {"prompt": "zwölf?", "answer": "12", "level": 4},
    {"prompt": "half?", "answer": 0.5, "level": 5},
]


def test_jsonl_rows_become_prompts(tokenizer, tmp_path):
    found = load(tokenizer, write_jsonl(tmp_path / "a.jsonl", ROWS))
    assert [p.id for p in found.prompts] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    assert [p.text for p in found.prompts] == ["one?", "zwölf?", "half?"]
    assert [text_of(p) for p in found.prompts] == ["one?", "zwölf?", "half?"]
    assert [p.answer for p in found.prompts] == ["1", "12", "0.5"]
    assert [dict(p.extras) for p in found.prompts] == [{"level": 3}, {"level": 4}, {"level": 5}]
    assert found.demonstrations(0) == ()
    assert (len(found), found.skipped, found.bad_rows) == (3, {}, ())
    assert pickle.loads(pickle.dumps(found.prompts)) == found.prompts


def test_parquet_equals_jsonl(tokenizer, tmp_path):
    rows = [{**row, "answer": str(row["answer"])} for row in ROWS] * 700  # several batches and chunks
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    a = load(tokenizer, {"kind": "parquet", "path": str(tmp_path / "a.parquet")})
    b = load(tokenizer, write_jsonl(tmp_path / "a.jsonl", rows))
    assert [(p.token_ids, p.text, p.answer, p.extras) for p in a.prompts] == [
        (p.token_ids, p.text, p.answer, p.extras) for p in b.prompts
    ]
    assert a.prompts[-1].id == "a.parquet:2100"


def test_hf_data_sets_from_disk_and_from_files(tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{**row, "answer": str(row["answer"])} for row in ROWS]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "flat")
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "splits")
    for folder, split in (("flat", "train"), ("splits", "test")):
        path = str(tmp_path / folder)
        found = load(tokenizer, {"kind": "hf", "path": path, "split": split})
        assert [(p.id, p.text, p.answer) for p in found.prompts] == [
            (f"{path}:{split}:{i + 1}", row["prompt"], row["answer"]) for i, row in enumerate(rows)
        ]
    assert "cannot load the data set" in error_of(
        tokenizer, {"kind": "hf", "path": str(tmp_path / "splits"), "split": "x"}
    )
    wrong = {"kind": "hf", "path": str(tmp_path / "flat"), "prompt_column": "promt"}
    assert "set prompt_column to the nearest, 'prompt'" in error_of(tokenizer, wrong)


def test_hub_data_sets_get_name_split_and_options(tokenizer, monkeypatch):
    calls = []

    class Rows(list):
        column_names = None

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return Rows(ROWS)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    source = {"kind": "hf", "path": "some/set", "name": "main", "split": "test", "options": {"revision": "abc"}}
    assert len(load(tokenizer, source)) == 3
    assert calls == [(("some/set", "main"), {"split": "test", "revision": "abc"})]


@pytest.mark.parametrize(("module", "kind"), [("datasets", "hf"), ("reasoning_gym", "reasoning_gym")])
def test_missing_packages_are_named(tokenizer, monkeypatch, module, kind):
    monkeypatch.setitem(sys.modules, module, None)
    message = error_of(tokenizer, {"kind": kind, "path": "x/y", "name": "countdown"})
    assert f"pip install {module.replace('_', '-')}" in message


def test_reasoning_gym_entries_can_be_scored(tokenizer):
    source = {"kind": "reasoning_gym", "name": "basic_arithmetic", "limit": 5, "options": {"max_terms": 4}}
    found = load(tokenizer, source)
    assert len(found) == 5
    import reasoning_gym

    for prompt in found.prompts:
        extras = pickle.loads(pickle.dumps(prompt.extras))
        scorer = reasoning_gym.create_dataset(extras["dataset"], **extras["dataset_options"])
        assert scorer.score_answer(answer=prompt.answer, entry=extras["entry"]) == 1
    heldout = load(tokenizer, {**source, "split": "heldout"})
    assert {p.id for p in found.prompts}.isdisjoint(p.id for p in heldout.prompts)
    assert [p.text for p in heldout.prompts] != [p.text for p in found.prompts]
    assert load(tokenizer, source).fingerprint() == found.fingerprint() != heldout.fingerprint()
    unanswered = load(tokenizer, {"kind": "reasoning_gym", "name": "graph_color", "limit": 1, "options": {"seed": 4}})
    assert (unanswered.prompts[0].id, unanswered.prompts[0].answer) == ("graph_color-4-0", "")
    assert "did you mean basic_arithmetic?" in error_of(tokenizer, {"kind": "reasoning_gym", "name": "basic_aritmetic"})
    assert "refuses the options" in error_of(tokenizer, {**source, "options": {"sise": 3}})


def test_tasks_bring_demonstrations_and_measurements():
    task = make_task("addition", {"weights": {"move": 3}})
    source = {"kind": "task", "name": "addition", "split": "sft", "limit": 20, "options": {"weights": {"move": 3}}}
    found = load(build_task_tokenizer(task), source)
    problems = task.split("sft")[:20]
    assert [p.extras["problem"] for p in found.prompts] == list(problems)
    assert all(p.extras["task"] == "addition" for p in found.prompts)
    for index, problem in enumerate(problems):
        assert found.demonstrations(index) == tuple(d.text for d in task.demonstrations(problem))
        assert found.demonstration_weights_P[index] == (1, 1, 1, 1, 3)
        assert found.prompts[index].answer == str(sum(problem))


def test_chat_template_wraps_prompt_and_system(tokenizer, tmp_path):
    conversation = [{"role": "system", "content": "S"}, {"role": "user", "content": "u"}]
    rows = [{"prompt": "hi", "answer": "x"}, {"prompt": conversation, "answer": "y"}]
    found = load(tokenizer, write_jsonl(tmp_path / "a.jsonl", rows), template="chat", system_prompt="sys")
    assert [text_of(p) for p in found.prompts] == ["<system>sys<user>hi<assistant>", "<system>S<user>u<assistant>"]
    assert [p.text for p in found.prompts] == ["hi", "u"]


def test_templates_that_cannot_work_are_refused(tokenizer, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ROWS)
    words = build_task_tokenizer(make_task("addition"))
    assert "set data.template: plain" in error_of(words, source, template="chat")
    assert "unset it, or set data.template: chat" in error_of(tokenizer, source, system_prompt="s")


def test_plain_text_begins_a_sequence_but_never_ends_it(tokenizer, tmp_path):
    ends = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>", bos_token="<bos>")
    ends.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 258), ("<eos>", 257)]
    )
    found = load(ends, write_jsonl(tmp_path / "a.jsonl", [{"prompt": "ab", "answer": "x"}]))
    plain = load(tokenizer, write_jsonl(tmp_path / "a.jsonl", [{"prompt": "ab", "answer": "x"}]))
    assert found.prompts[0].token_ids == (258, *plain.prompts[0].token_ids)


def test_columns_can_be_renamed_nested_and_demonstrate(tokenizer, tmp_path):
    row = {"q": "?", "reward": {"truth": {"value": 7}}, "key": 11, "worked": ["a", "b"], "more": None}
    source = write_jsonl(tmp_path / "a.jsonl", [row])
    source |= {"prompt_column": "q", "answer_column": "reward.truth.value", "id_column": "key"}
    found = load(tokenizer, {**source, "demonstration_column": "worked"})
    assert (found.prompts[0].id, found.prompts[0].answer) == ("11", "7")
    assert found.demonstrations(0) == ("a", "b")
    assert found.demonstration_weights_P == ((1.0, 1.0),)
    assert set(found.prompts[0].extras) == {"reward", "more"}
    assert "no 'valu' inside column" in error_of(tokenizer, {**source, "answer_column": "reward.truth.valu"})


BAD_LINES = [
    (b'{"prompt": "ok", "answer": "1", "id": "a"}', None, ""),
    (b'{"prompt": "torn", ', "malformed", "not valid JSON"),
    (b'["prompt", "answer"]', "malformed", "not a JSON object"),
    (b"[" * 200_000, "malformed", "not readable JSON"),
    (b'{"prompt": "\xff", "answer": "1", "id": "u"}', "malformed", "not UTF-8 (byte 0xff at position 13 of the line)"),
    (b'{"Prompt": "x", "answer": "1", "id": "b"}', "missing column", "set prompt_column to the nearest, 'Prompt'"),
    (b'{"prompt": "x", "id": "b"}', "missing column", "no column 'answer': set answer_column to one of prompt, id"),
    (b"{}", "missing column", "the row is an empty object"),
    (b'{"prompt": 7, "answer": "1", "id": "b"}', "wrong type", "column 'prompt' holds a number, expected text"),
    (b'{"prompt": ["x"], "answer": "1", "id": "b"}', "wrong type", "list of something else than {role, content}"),
    (b'{"prompt": "x", "answer": {"a": 1}, "id": "b"}', "wrong type", "column 'answer' holds an object"),
    (b'{"prompt": "x", "answer": true, "id": "b"}', "wrong type", "column 'answer' holds true or false"),
    (b'{"prompt": " \\n", "answer": "1", "id": "b"}', "empty", "column 'prompt' is empty"),
    (b'{"prompt": [], "answer": "1", "id": "b"}', "empty", "no message to answer"),
    (b'{"prompt": "x", "answer": null, "id": "b"}', "empty", "column 'answer' is empty"),
    (b'{"prompt": "x", "answer": "", "id": "b"}', "empty", "column 'answer' is empty"),
    (b'{"prompt": "x", "answer": "1", "id": "a"}', "duplicate id", "'a' was used before, at"),
    (b'{"prompt": "0123456789x", "answer": "1", "id": "b"}', "too long", "has 11 tokens, more than data.max_prompt"),
    (b'{"prompt": "\\ud800", "answer": "1", "id": "b"}', "template", "the tokenizer cannot encode it"),
    (b"", None, ""),
    (b'{"prompt": "end", "answer": "1", "id": "z"}', None, ""),
]


def test_bad_rows_are_counted_or_refused(tokenizer, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(line for line, _, _ in BAD_LINES))
    source = {"kind": "jsonl", "path": str(path), "id_column": "id"}
    bad = [(number, kind, why) for number, (_, kind, why) in enumerate(BAD_LINES, start=1) if kind]

    found = load(tokenizer, source, on_bad_row="skip", max_prompt_tokens=10)
    assert [p.id for p in found.prompts] == ["a", "z"]
    assert sum(found.skipped.values()) == len(bad) == len(found.bad_rows)
    for row, (number, kind, why) in zip(found.bad_rows, bad, strict=True):
        assert row.where == f"{path}:{number}"
        assert row.kind == kind
        assert why in row.reason
    assert found.skipped["wrong type"] == 4

    message = error_of(tokenizer, source, max_prompt_tokens=10)
    assert message.startswith(f"data.train: {len(bad)} bad rows in jsonl {path}")
    assert f"{path}:2: not valid JSON" in message
    assert f"... and {len(bad) - 5} more" in message
    assert "data.on_bad_row: skip" in message


def test_chat_rows_that_cannot_be_rendered_are_bad(tokenizer, tmp_path):
    rows = [
        {"prompt": "boom", "answer": "1"},
        {"prompt": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}], "answer": "1"},
        {"prompt": "fine", "answer": "1"},
    ]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    found = load(tokenizer, source, template="chat", on_bad_row="skip")
    assert [(row.where[-1], row.kind) for row in found.bad_rows] == [("1", "template"), ("2", "wrong type")]
    assert "no booms" in found.bad_rows[0].reason
    messages = write_jsonl(tmp_path / "b.jsonl", [{"prompt": [{"role": "user", "content": "u"}], "answer": "1"}])
    assert "a list of messages: set data.template: chat" in error_of(tokenizer, messages)


def test_a_set_of_nothing_but_bad_rows_is_refused_even_under_skip(tokenizer, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"question": "x", "answer": "1"}] * 3)
    message = error_of(tokenizer, source, on_bad_row="skip")
    assert "no usable prompt: 3 bad rows" in message
    assert "no column 'prompt'" in message


def test_limit_stops_at_good_rows(tokenizer, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "", "answer": "1"}, *ROWS, {"prompt": "", "answer": "1"}])
    found = load(tokenizer, {**source, "limit": 2}, on_bad_row="skip")
    assert [p.text for p in found.prompts] == ["one?", "zwölf?"]
    assert found.skipped == {"empty": 1}


def test_globs_keep_ids_apart_and_independent_of_the_place(tokenizer, tmp_path):
    for root in ("here", "there"):
        for folder in ("a", "b"):
            (tmp_path / root / folder).mkdir(parents=True)
            write_jsonl(tmp_path / root / folder / "x.jsonl", ROWS[:1])
    here, there = (
        load(tokenizer, {"kind": "jsonl", "path": str(tmp_path / root / "**" / "*.jsonl")})
        for root in ("here", "there")
    )
    assert [p.id for p in here.prompts] == ["a/x.jsonl:1", "b/x.jsonl:1"]
    assert here.fingerprint() == there.fingerprint()


def test_files_that_cannot_be_read_are_named(tokenizer, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    (tmp_path / "utf16.jsonl").write_bytes('{"prompt": "x"}'.encode("utf-16"))
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    parquet.write_table(pyarrow.table({"promt": ["x"], "answer": ["1"]}), tmp_path / "typo.parquet")
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], "string"), "answer": []}), tmp_path / "none.parquet")

    def jsonl(name):
        return error_of(tokenizer, {"kind": "jsonl", "path": str(tmp_path / name)})

    def pq(name):
        return error_of(tokenizer, {"kind": "parquet", "path": str(tmp_path / name)}, on_bad_row="skip")

    assert f"did you mean {tmp_path / 'train.jsonl'}?" in jsonl("trian.jsonl")
    assert "nor a folder" in jsonl("nowhere/train.jsonl")
    assert "is a folder: name a file or a glob" in jsonl("")
    assert "no file matches" in jsonl("*.json")
    assert "is empty" in jsonl("empty.jsonl")
    assert "is UTF-16" in jsonl("utf16.jsonl")
    assert "bad.parquet as Parquet" in pq("bad.parquet")
    assert "set prompt_column to the nearest, 'promt'" in pq("typo.parquet")
    assert "is empty" in pq("none.parquet")
    assert "set path" in error_of(tokenizer, {"kind": "jsonl"})


def test_a_byte_order_mark_is_no_part_of_the_first_row(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b"\r\n")
    assert load(tokenizer, {"kind": "jsonl", "path": str(path)}).prompts[0].text == "one?"


def test_messages_name_the_section(tokenizer, tmp_path):
    train = SourceConfig(**write_jsonl(tmp_path / "a.jsonl", ROWS))
    heldout = SourceConfig(kind="jsonl", path=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"^data\.heldout: there is no file"):
        load_prompts(heldout, DataConfig(train=train, heldout=heldout, template="plain"), tokenizer)


def test_importing_the_package_is_light():
    """Verifier workers and --dry-run import it: nothing heavy may come along."""
    heavy = ["torch", "transformers", "tokenizers", "reasoning_gym", "datasets", "pyarrow"]
    code = f"import sys, megatron_gcpo.data; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"

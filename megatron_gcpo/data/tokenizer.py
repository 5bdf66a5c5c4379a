"""Tokenizers: the word-level one of a packaged task, or any Hugging Face one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_gcpo.data.tasks import Task, make_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from megatron_gcpo.config.records import ModelConfig, SourceConfig

PAD, EOS = "<pad>", "<eos>"


def build_task_tokenizer(task: Task | type[Task]) -> PreTrainedTokenizerFast:
    """One token per word or digit of a task of style "words"; text is split at whitespace.

    Ids: <pad> 0, <eos> 1, then ``task.vocabulary`` in its order; ``len(tokenizer)`` is the vocabulary size. It depends
    on the task alone, not on its options, so a warm start and the run after it agree. ``decode`` joins words with one
    space; a word outside the vocabulary raises.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = (PAD, EOS, *task.vocabulary)
    assert len(set(words)) == len(words), f"got repeated words in the vocabulary of {task.name}, expected distinct ones"
    # Without an unknown token: a word that the task cannot say is an error, never a silent <unk>.
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}))
    backend.pre_tokenizer = WhitespaceSplit()
    # clean-up would glue " ." and " ?" to the word before, and decode(encode(text)) would differ from text
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def load_tokenizer(model: ModelConfig, source: SourceConfig | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a run: ``model.tokenizer``, else ``model.path``; "task" builds the one of the source's task.

    A tokenizer without a padding token pads with its end-of-sequence token. Code inside a checkpoint is never run.

    Raises:
        ValueError: nothing names a tokenizer; "task" without a task; no such folder or hub id, or it cannot be read;
            no end-of-sequence token.
    """
    name = model.tokenizer or model.path
    if name is None:
        raise ValueError('no tokenizer: set model.tokenizer to a folder, a hub id or "task" (or set model.path)')
    if name == "task":
        if source is None or source.kind != "task":
            kind = "no source" if source is None else f"kind {source.kind}"
            raise ValueError(f'model.tokenizer "task" needs data.train.kind: task, got {kind}; else set it to a folder')
        task = make_task(source.name, source.options)
        if task.style != "words":
            raise ValueError(
                f'model.tokenizer "task" only knows the words of style "words", got style {task.style!r}: drop '
                "data.train.options.style, or set model.tokenizer to the tokenizer of a language model"
            )
        return build_task_tokenizer(task)
    return load_hf_tokenizer(name)


def load_hf_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder or hub id; errors as ``load_tokenizer``."""
    folder = Path(name).expanduser()
    if folder.is_file():
        raise ValueError(f"tokenizer {name} is a file: set model.tokenizer (or model.path) to the folder that holds it")
    # A hub id is NAME or OWNER/NAME. Anything else must be a folder: no point in asking a hub about it for a minute.
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not folder.is_dir():
        raise ValueError(
            f"there is no tokenizer folder {name}: set model.tokenizer (or model.path) to a folder or hub id"
        )

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else name, trust_remote_code=False)
    except Exception as error:  # the library raises OSError, ValueError, KeyError, bare Exception, ... for bad folders
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        what = "folder" if folder.is_dir() else "hub id (no such folder here)"
        raise ValueError(
            f"cannot load a tokenizer from the {what} {name}: {reason} "
            "Set model.tokenizer to a folder with tokenizer.json, or to a hub id that this machine can reach."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {name} has no end-of-sequence token: set eos_token in tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer

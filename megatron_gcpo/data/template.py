"""From a problem to the tokens the policy sees: chat template or plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_gcpo.data.records import Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_gcpo.config.records import DataConfig

type Encoded = tuple[int, ...] | str
"""Token ids, or why there are none."""


def check_template(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a template that the tokenizer cannot apply."""
    if data.template == "chat" and tokenizer.chat_template is None:
        raise ValueError(
            "data.template is chat, but the tokenizer has no chat template: set data.template: plain, or put a "
            "chat_template into the tokenizer's folder (base models often lack one that their chat siblings have)"
        )
    if data.template == "plain" and data.system_prompt is not None:
        raise ValueError("data.system_prompt has no place in plain text: unset it, or set data.template: chat")


def encode_prompts(
    prompts: Sequence[str | Messages], data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Encoded]:
    """Token ids of each templated prompt, in order; a string with the reason where the template or tokenizer refuses.

    chat: system prompt (unless the row brings its own system message), the messages, and the header of the answer.
    plain: the text with the tokenizer's own beginning-of-sequence token if it has one; an end-of-sequence token that a
    tokenizer appends is dropped, since it would tell the policy that the text is over.
    """
    rendered = [_render(prompt, data, tokenizer) for prompt in prompts]
    texts = [text for text, problem in rendered if problem is None]
    encoded = iter(_tokenize(texts, data, tokenizer))
    return [problem if problem is not None else next(encoded) for _, problem in rendered]


def turn_frame(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """What makes a user's text the token ids between the end of an answer and the beginning of the next one.

    chat: the end of the answer, the user's turn and the header of the next answer, as the template writes them around an
    answer in a longer conversation.  plain: the text on a line of its own.

    Raises (the function returned): ValueError for a template that cannot hold a conversation, or a tokenizer that lacks
    the user's words.
    """

    def frame(text: str) -> list[int]:
        if data.template == "plain":
            between = f"\n{text}\n"
        else:
            said = ("user", "."), ("assistant", _MARK), ("user", text)
            messages = [{"role": role, "content": content} for role, content in said]
            rendered, problem = _render(messages, data, tokenizer)
            if problem is not None or rendered.count(_MARK) != 1:
                why = problem or "it does not write an earlier answer as it was given"
                raise ValueError(f"the chat template cannot hold a conversation of several turns: {why}")
            between = rendered.partition(_MARK)[2]
        try:
            return list(tokenizer(between, add_special_tokens=False)["input_ids"])
        except Exception as error:  # a border, as in _tokenize
            raise ValueError(f"the tokenizer cannot encode a user's turn, {text!r}: {error}") from None

    return frame


_MARK = "(((answer)))"


def _render(prompt: str | Messages, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str | None]:
    """(text, None), or ("", why not)."""
    if data.template == "plain":
        if isinstance(prompt, str):
            return prompt, None
        return "", "the prompt is a list of messages: set data.template: chat, or prompt_column to a column of text"
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a border: templates are programs of the checkpoint's authors and raise what they like
        return "", f"the chat template refuses it: {error}"
    assert isinstance(text, str), f"got {type(text)} from the chat template, expected text"
    return text, None


def _tokenize(texts: list[str], data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    if not texts:
        return []
    # A chat template writes its special tokens itself.
    special = data.template == "plain"
    try:
        rows = tokenizer(texts, add_special_tokens=special)["input_ids"]
    except Exception as error:  # a border: tokenizers raise bare exceptions, without saying for which text
        if len(texts) == 1:
            return [f"the tokenizer cannot encode it: {error}"]
        return [_tokenize([text], data, tokenizer)[0] for text in texts]
    appended = special and tokenizer.eos_token_id in tokenizer("", add_special_tokens=True)["input_ids"][-1:]
    return [tuple(row[:-1] if appended else row) for row in rows]

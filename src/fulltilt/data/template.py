"""Conversion of a prompt as a person wrote it into the token ids that the model reads.

Enters: a string or a list of messages. Leaves: int64 ids and the text they stand for. Guaranteed: at most one beginning-of-sequence token
at the front; no end-of-sequence token that the tokenizer appended by itself (the model would continue an ended text); messages always end
with the template's generation prompt; no setting is ignored: one that cannot take effect is a `UserError`; any error of a template or a
tokenizer becomes one, too. Errors do not say where the row is: the caller knows its file and line and adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fulltilt.model import chat_template
from fulltilt.records import UserError
from fulltilt.words import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fulltilt.schema import DataConfig

Message = dict[str, Any]
TEMPLATE_REMEDY = "Change the messages, or set model.chat_template."
_MOST_CHARACTERS = 2**24  # longest text that is tokenised if no limit in tokens is set: no model reads more

# Arguments of apply_chat_template that control how ids are made, not what the template writes; fulltilt sets these itself.
_RESERVED_ARGUMENTS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages", "padding",
        "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "truncation",
    }
)  # fmt: skip


class Encoded(NamedTuple):
    ids: np.ndarray  # int64
    text: str  # the same, decoded
    source: str | tuple[Message, ...]  # what the ids were made from: the string, or the messages as the template got them


class OverLong(Exception):
    """A text that exceeds the limit `key`, as its number of characters shows without tokenising it: it has `tokens` or more."""

    def __init__(self, key: str, tokens: int) -> None:
        super().__init__(key, tokens)
        self.key, self.tokens = key, tokens


class PromptEncoder:
    """Encodes the prompts of a data set, all in the same way, for rollout and for SFT."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, remedy: str = TEMPLATE_REMEDY) -> None:
        """Make an encoder. `remedy`: what to do if the chat template fails."""
        self._tokenizer, self._remedy = tokenizer, remedy
        self._system = config.system
        self._template_args = config.template_args
        self._limits = {"data.max_prompt_tokens": config.max_prompt_tokens, "data.max_tokens": config.max_tokens}
        self._refuse_arguments_without_effect()
        self._messages_of_string: Callable[[str], list[Message] | None] = self._plain_string
        self._messages_of_list: Callable[[object], list[Message]] = checked_messages
        if config.apply_template == "always":
            self._template()
            self._messages_of_string = _as_user_message
        elif config.apply_template == "never":
            self._refuse_settings_of_templates("data.apply_template is 'never'")
            self._messages_of_list = _refuse_messages

    def encode(self, prompt: object, limit: str = "") -> Encoded:
        """Encode a prompt as rollout reads it. `limit` is the key of the length limit that leaves it out of a data set."""
        messages = self.messages(prompt)
        if messages is not None and messages[-1]["role"] == "assistant":
            raise UserError("the last message of the prompt is the assistant's: there is nothing to answer. Remove that message.")
        if messages is None:
            ids = self._encode_string(self._short_enough(str(prompt), limit))
        else:
            ids = self.encode_messages(messages, add_generation_prompt=True, limit=limit)
        if not ids:
            raise UserError("the prompt has no tokens. Give it a text, or leave it out.")
        return Encoded(np.asarray(ids, dtype=np.int64), self.decode(ids), str(prompt) if messages is None else tuple(messages))

    def messages(self, prompt: object) -> list[Message] | None:
        """Return the messages of a prompt or conversation that go through the template, the system message included; None for a string that
        stays plain."""
        messages = self._messages_of_string(prompt) if isinstance(prompt, str) else self._messages_of_list(prompt)
        if messages is None or self._system is None or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    def reads(self, name: str) -> bool:
        """Return whether the chat template mentions a key of messages or an argument."""
        return name in self._template()

    def encode_messages(self, messages: Sequence[Message], add_generation_prompt: bool, limit: str = "") -> list[int]:
        """Encode a conversation as the chat template writes it."""
        template = self._template()
        try:
            text = chat_template.render(
                self._tokenizer, template, messages, add_generation_prompt=add_generation_prompt, **self._template_args
            )
        except UserError as error:
            raise UserError(f"{error} {self._remedy}") from error
        # The template writes its own special tokens.
        return self._without_double_bos(self.encode_text(text, limit))

    def encode_text(self, text: str, limit: str = "") -> list[int]:
        """Encode text in the middle of a sequence: no special token is added."""
        return self._tokenise(self._short_enough(text, limit), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _encode_string(self, text: str) -> list[int]:
        plain = self.encode_text(text)
        full = self._tokenise(text)
        # Any token that the tokenizer puts after the text (an end of sequence, a separator) would end the prompt before the answer.
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return self._without_double_bos(full[:start] + plain)
        raise UserError("the tokenizer writes this text differently when it adds special tokens. Use messages and a chat template instead.")

    def _tokenise(self, text: str, **options: Any) -> list[int]:
        try:
            return list(map(int, self._tokenizer(text, return_attention_mask=False, **options)["input_ids"]))
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic in the tokenizer's compiled code is not an Exception
            raise UserError(f"the tokenizer cannot read this text ({first_line(error)}). Change it, or leave it out.") from error

    def _short_enough(self, text: str, limit: str) -> str:
        """Refuse a text that no tokenizer can bring within the limit: tokenising it could take minutes."""
        most = self._limits.get(limit)
        if most is None:
            if len(text) > _MOST_CHARACTERS:
                raise UserError(
                    f"the text has {len(text)} characters. Shorten it, or leave it out; for SFT, data.max_tokens leaves it out."
                )
        # A few tokens at the end of a text may be dropped.
        elif len(text) > 32 * (most + 16) and len(text) > self._longest_token * (most + 16):
            raise OverLong(limit, len(text) // self._longest_token)
        return text

    @cached_property
    def _longest_token(self) -> int:
        """Return the most characters of one token."""
        return max(32, *map(len, self._tokenizer.get_vocab()))

    def _without_double_bos(self, ids: list[int]) -> list[int]:
        bos = self._tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids

    def _plain_string(self, text: str) -> None:
        if not text.strip():
            raise UserError("the prompt is empty. Give it a text, or leave it out.")
        self._refuse_settings_of_templates("the prompt is a plain string and data.apply_template is not 'always'")

    def _refuse_settings_of_templates(self, reason: str) -> None:
        if self._system is not None:
            raise UserError(f"data.system needs a chat template, but {reason}. Set data.apply_template = 'always', or remove data.system.")
        if self._template_args:
            raise UserError(f"data.template_args need a chat template, but {reason}. Set data.apply_template = 'always', or remove them.")

    def _template(self) -> str:
        try:
            return str(self._tokenizer.get_chat_template(tools=self._template_args.get("tools")))
        except ValueError as error:
            raise UserError(
                "the prompt needs a chat template, and the model's tokenizer has none. Set model.chat_template to a file with one, or "
                "write prompts as plain strings with data.apply_template = 'auto'."
            ) from error

    def _refuse_arguments_without_effect(self) -> None:
        reserved = sorted(_RESERVED_ARGUMENTS & set(self._template_args))
        if reserved:
            raise UserError(f"data.template_args cannot set {', '.join(reserved)}: fulltilt sets it itself. Remove it.")
        if not self._template_args or not self._tokenizer.chat_template:
            return
        unread = sorted(name for name in self._template_args if not self.reads(name))
        if unread:
            raise UserError(f"data.template_args: the chat template does not read {', '.join(unread)}. Remove it, or check its spelling.")


def checked_messages(value: object) -> list[Message]:
    """Return the messages of a conversation as plain dictionaries, or raise a `UserError` that says which one is wrong."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UserError(f"expected a string or a list of messages, found {type(value).__name__}. Check data.prompt_key.")
    messages = [_checked_message(number, message) for number, message in enumerate(value, start=1)]
    if not any(message.get("content") or message.get("tool_calls") for message in messages):
        raise UserError("the prompt is empty. Give it a text, or leave it out.")
    return messages


def without_missing(value: Any) -> Any:
    """Return the value without keys that are None: in a parquet column every struct has the keys of all the others."""
    if isinstance(value, Mapping):
        return {key: without_missing(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [without_missing(entry) for entry in value]
    return value


def _as_user_message(text: str) -> list[Message]:
    return checked_messages([{"role": "user", "content": text}] if text.strip() else [])


def _refuse_messages(prompt: object) -> list[Message]:
    checked_messages(prompt)
    raise UserError("the prompt is a list of messages, but data.apply_template is 'never'. Set it to 'auto', or write prompts as strings.")


def _checked_message(number: int, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise UserError(
            f'message {number} is of type {type(message).__name__}, not an object such as {{"role": "user", "content": "..."}}.'
        )
    present: Message = without_missing(message)
    role, content = present.get("role"), present.get("content")
    if not isinstance(role, str) or not role:
        raise UserError(f"message {number} has no 'role' (a string such as 'user'); its keys are: {', '.join(present) or 'none'}.")
    if content is None and not present.keys() - {"role", "content"}:
        raise UserError(f"message {number} ({role}) has no 'content'.")
    if content is not None and not isinstance(content, str | list):
        raise UserError(f"message {number} ({role}) has a 'content' of type {type(content).__name__}; it must be a string.")
    if not isinstance(present.get("reasoning_content", ""), str):
        raise UserError(f"message {number} ({role}) has a 'reasoning_content' that is not a string.")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str) or part.get("type", "text") != "text":
            raise UserError(f"message {number} has a part that is not text. Only text is supported: write 'content' as a string.")
    return present

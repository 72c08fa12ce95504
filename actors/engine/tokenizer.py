"""Text to token ids and back, for checkpoints with a tokenizer and for dummy models without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torpor.actors.engine.protocol import InvalidPrompt


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def encode_messages(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """A conversation through the chat template, ready for the assistant's turn. Raises InvalidPrompt."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens are left out; an incomplete UTF-8 sequence shows as U+FFFD."""


class PretrainedTokenizer:
    """A transformers tokenizer. Its methods are called from several threads; encoding keeps no state."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def encode_messages(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        check_messages(messages)
        if not self._tokenizer.chat_template:
            raise InvalidPrompt("this model has no chat template; send a prompt instead of messages")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template is the checkpoint's own program: it may raise anything
            raise InvalidPrompt(f"the model's chat template refused these messages: {error}") from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


class ByteTokenizer:
    """For models without a tokenizer: one token a UTF-8 byte. Ids from 256 on decode to nothing."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        token_ids = list(text.encode("utf-8"))
        if token_ids and max(token_ids) >= self._vocab_size:
            raise InvalidPrompt(
                f"this model has no tokenizer and only {self._vocab_size} tokens; send token ids"
            )
        return token_ids

    def encode_messages(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        check_messages(messages)
        turns = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(turns) + "assistant: ")

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")


def check_messages(messages: Sequence[Mapping[str, object]]) -> None:
    """Raises InvalidPrompt unless each message has a role and text content."""
    if not messages:
        raise InvalidPrompt("messages is empty; send at least one")
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidPrompt(f"messages[{index}] has no role")
        if not isinstance(content, str):
            raise InvalidPrompt(f"messages[{index}] has no text content; this engine takes text only")

"""Chats as tokens: rendered by the tokenizer's own template in one piece, each token with why it does not count."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from halfbyte.calibration.masks import character_reasons, token_reasons
from halfbyte.calibration.placement import place
from halfbyte.calibration.records import Chat

# Templates that write today's date would give other tokens tomorrow, so they are shown one day for ever, by a macro:
# transformers passes no functions on to templates.
_DAY = datetime(2025, 1, 1)
_ONE_DAY = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('%{letter}', '{_DAY:%{letter}}')" for letter in "aAbBdHIjmMpSyY")
    + " }}{% endmacro %}\n"
)


@dataclass(frozen=True)
class EncodedChat:
    """ids, reasons: a token, and why it does not count (``masks.COUNTS`` if it does). lost: messages that have a
    content of which the template's text shows nothing; nothing of them counts.
    """

    ids: list[int]
    reasons: list[str]
    lost: int


def encode_chat(tokenizer: Any, chat: Chat, masked_roles: Collection[str]) -> EncodedChat:
    """A chat as the model sees it. tokenizer: a transformers tokenizer with offsets and a chat template.

    Errors: a tokenizer without either, a template that refuses the messages; all with the chat's place.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        chat.row.refuse("is a chat and the tokenizer has no chat template; give plain text or token ids")
    if not tokenizer.is_fast:
        chat.row.refuse(
            "is a chat and the tokenizer tells no offsets (it is none of the `tokenizers` library)"
        )

    def render(contents: Sequence[str]) -> str:
        return _render(tokenizer, chat, contents)

    contents = [message.content for message in chat.messages]
    text = render(contents)
    places = place(contents, text, render)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    characters = character_reasons(len(text), chat.messages, places, masked_roles)
    lost = sum(
        where is None and bool(content.strip()) for where, content in zip(places, contents, strict=True)
    )
    return EncodedChat(list(encoded["input_ids"]), token_reasons(encoded["offset_mapping"], characters), lost)


def _render(tokenizer: Any, chat: Chat, contents: Sequence[str]) -> str:
    messages = [
        {**message.fields, "content": content}
        for message, content in zip(chat.messages, contents, strict=True)
    ]
    try:
        template = tokenizer.get_chat_template(tools=chat.tools)
        return tokenizer.apply_chat_template(
            messages, tools=chat.tools, tokenize=False, chat_template=_ONE_DAY + template
        )
    except Exception as error:  # a template is a program of others and may raise anything
        chat.row.refuse(f"the tokenizer's chat template fails: {str(error) or type(error).__name__}")

"""Chat messages of a row, in the two layouts that data sets use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.calibration.rows import Row, kind

SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Message:
    """fields: what a chat template sees, role and content included. weight: whether the content counts at all.
    spans: character ranges of the content, start to stop, that do not count.
    """

    fields: dict[str, Any]
    weight: bool = True
    spans: Sequence[tuple[int, int]] = ()

    @property
    def role(self) -> str:
        return self.fields["role"]

    @property
    def content(self) -> str:
        return self.fields["content"]


def parse_messages(row: Row, column: str) -> list[Message]:
    """The messages in ``column``, a list of ``{role, content}`` or of ShareGPT's ``{from, value}``.

    A message may carry ``mask`` (``[[start, stop], ...]``) and ``weight`` (0 or 1); everything else goes to the chat
    template. Content may be null where there are ``tool_calls``, and a list of text parts.
    Errors: whatever has another form, with the message's number from 1.
    """
    messages = row.get(column)
    if not isinstance(messages, list):
        row.refuse(f"{column} is {kind(messages)}, expected a list of messages")
    return [_parse(row, f"message {i} of {column}", message) for i, message in enumerate(messages, 1)]


def _parse(row: Row, what: str, message: object) -> Message:
    if not isinstance(message, dict):
        row.refuse(f"{what} is {kind(message)}, expected an object with role and content")
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields.pop("role", None) or fields.pop("from", None)
    if role is None:
        row.refuse(f"{what} has no role (found {', '.join(map(str, message)) or 'nothing'})")
    role = row.text(role, f"the role of {what}")
    content = _content(row, what, fields)
    weight = fields.pop("weight", 1)
    if weight not in (0, 1):
        row.refuse(f"the weight of {what} is {str(weight)[:20]!r}, expected 0 or 1")
    spans = _spans(row, what, fields.pop("mask", []), len(content))
    return Message(
        {**fields, "role": SHAREGPT_ROLES.get(role, role), "content": content}, bool(weight), spans
    )


def _content(row: Row, what: str, fields: dict[str, Any]) -> str:
    content = fields.pop("content", None)
    if content is None:
        content = fields.pop("value", None)
    if content is None and fields.get("tool_calls"):
        return ""
    if isinstance(content, list):
        return "".join(_part(row, what, part) for part in content)
    return row.text(content, f"the content of {what}")


def _part(row: Row, what: str, part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        row.refuse(f"the content of {what} has a part that is no text; images and sound cannot be used")
    return row.text(part.get("text"), f"a text part of {what}")


def _spans(row: Row, what: str, spans: object, length: int) -> list[tuple[int, int]]:
    if not isinstance(spans, list):
        row.refuse(f"the mask of {what} is {kind(spans)}, expected [[start, stop], ...]")
    for span in spans:
        whole = isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span)
        if not whole or not 0 <= span[0] <= span[1] <= length:
            row.refuse(
                f"the mask of {what} has the range {str(span)[:40]}, expected [start, stop] within the "
                f"{length} characters of the content"
            )
    return [(start, stop) for start, stop in spans]

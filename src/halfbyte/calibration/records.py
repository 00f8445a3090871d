"""What a row of a data file means: a document, a chat or token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.calibration.messages import Message, parse_messages
from halfbyte.calibration.rows import Row, kind

CHAT_COLUMNS = ("messages", "conversations")
TEXT_COLUMNS = ("text", "content")
PAIRS: dict[tuple[str, ...], str] = {
    ("prompt", "completion"): "",
    ("prompt", "response"): "\n",
    ("question", "answer"): "\n",
    ("instruction", "output"): "\n",
}
"""Columns that make one document, and what joins them: a completion goes on where its prompt stops."""

COLUMNS = (
    "input_ids",
    "attention_mask",
    *CHAT_COLUMNS,
    "tools",
    *TEXT_COLUMNS,
    *dict.fromkeys(name for pair in PAIRS for name in pair),
)
"""Every column that is looked at."""

ACCEPTED = ", ".join(["input_ids", *CHAT_COLUMNS, *TEXT_COLUMNS, *("+".join(pair) for pair in PAIRS)])


@dataclass(frozen=True)
class Document:
    text: str


@dataclass(frozen=True)
class Chat:
    """tools: JSON schemas for the chat template, where the row has some."""

    row: Row
    messages: Sequence[Message]
    tools: list[Any] | None


@dataclass(frozen=True)
class TokenIds:
    ids: list[int]


def meaning(columns: Iterable[str]) -> tuple[str, ...] | None:
    """The columns to read a row by: the first of those accepted that is there, or None."""
    found = set(columns)
    choices = [("input_ids",), *((name,) for name in (*CHAT_COLUMNS, *TEXT_COLUMNS)), *PAIRS]
    return next((choice for choice in choices if found.issuperset(choice)), None)


def parse(row: Row, vocabulary: int) -> Document | Chat | TokenIds:
    """What ``row`` holds. vocabulary: token ids must be below it.

    Errors: columns that mean nothing here (with those found), and values of the wrong form.
    """
    present = [name for name, value in row.columns.items() if value is not None]
    columns = meaning(present) or meaning(row.columns)
    if columns is None:
        row.refuse(f"has the columns {', '.join(present)[:200] or 'none'}; accepted are {ACCEPTED}")
    if columns == ("input_ids",):
        return TokenIds(_token_ids(row, vocabulary))
    if columns[0] in CHAT_COLUMNS:
        return Chat(row, parse_messages(row, columns[0]), _tools(row))
    return Document(PAIRS.get(columns, "").join(row.text(row.get(name), name) for name in columns))


def _tools(row: Row) -> list[Any] | None:
    tools = row.get("tools")
    if tools is not None and (
        not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)
    ):
        row.refuse("tools is no list of JSON schemas")
    return tools or None


def _token_ids(row: Row, vocabulary: int) -> list[int]:
    """The row's ids without those that its attention mask calls padding."""
    ids = _integers(row, "input_ids")
    for position, token in enumerate(ids):
        if not 0 <= token < vocabulary:
            row.refuse(
                f"token id {token} at position {position} is outside the vocabulary (0 to {vocabulary - 1})"
            )
    if row.get("attention_mask") is None:
        return ids
    mask = _integers(row, "attention_mask")
    if len(mask) != len(ids):
        row.refuse(f"attention_mask has {len(mask)} values for {len(ids)} input_ids")
    return [token for token, shown in zip(ids, mask, strict=True) if shown]


def _integers(row: Row, column: str) -> list[int]:
    values = row.get(column)
    if not isinstance(values, list):
        row.refuse(f"{column} is {kind(values)}, expected a list of integers")
    for position, value in enumerate(values):
        if type(value) is not int:
            row.refuse(f"{column} has {kind(value)} at position {position} that is no integer")
    return values

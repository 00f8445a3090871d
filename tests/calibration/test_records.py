from __future__ import annotations

from typing import Any

import pytest

from halfbyte.calibration.records import Document, TokenIds, parse
from halfbyte.calibration.rows import Row
from halfbyte.errors import HalfbyteError

VOCABULARY = 100


def parsed(columns: dict[str, Any]) -> object:
    return parse(Row("a.jsonl line 7", columns), VOCABULARY)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"text": "a", "content": "b"}, "a"),
        ({"content": "b", "id": 1}, "b"),
        ({"prompt": "2+2=", "completion": "4"}, "2+2=4"),
        ({"question": "Q", "answer": "A"}, "Q\nA"),
        ({"prompt": "Q", "response": "A"}, "Q\nA"),
        ({"instruction": "Q", "output": "A"}, "Q\nA"),
        ({"text": None, "content": "b"}, "b"),
    ],
)
def test_columns_that_make_a_document(columns: dict[str, Any], text: str) -> None:
    assert parsed(columns) == Document(text)


def test_padding_is_taken_out_of_token_ids() -> None:
    assert parsed({"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1]}) == TokenIds([5, 6])
    assert parsed({"input_ids": [0, 5]}) == TokenIds([0, 5])


def chat(*messages: object) -> dict[str, Any]:
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (
            {"body": "a", "id": 1},
            "has the columns body, id; accepted are input_ids, messages, conversations, text",
        ),
        ({"prompt": "a"}, "has the columns prompt; accepted are"),
        ({}, "has the columns none; accepted are"),
        ({"text": 3}, "text is a number, expected a string"),
        ({"text": None}, "text is null, expected a string"),
        ({"text": "a\ud800"}, "text is no valid Unicode (a lone surrogate at character 1)"),
        ({"input_ids": "1 2"}, "input_ids is a string, expected a list of integers"),
        ({"input_ids": [1, True]}, "input_ids has a boolean at position 1"),
        ({"input_ids": [1, 2.0]}, "input_ids has a number at position 1"),
        ({"input_ids": [1, 100]}, "token id 100 at position 1 is outside the vocabulary (0 to 99)"),
        ({"input_ids": [-1]}, "token id -1 at position 0 is outside"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask has 1 values for 2 input_ids"),
        ({"messages": "hi"}, "messages is a string, expected a list of messages"),
        (chat("hi"), "message 1 of messages is a string, expected an object"),
        (chat({"role": "user", "content": "a"}, {"content": "b"}), "message 2 of messages has no role"),
        (chat({"role": 1, "content": "a"}), "the role of message 1 of messages is a number"),
        (chat({"role": "user"}), "the content of message 1 of messages is null, expected a string"),
        (chat({"role": "user", "content": [{"type": "image"}]}), "has a part that is no text"),
        (chat({"role": "user", "content": "a", "weight": 0.5}), "the weight of message 1"),
        (chat({"role": "user", "content": "a", "mask": [[0, 2]]}), "has the range [0, 2], expected"),
        (chat({"role": "user", "content": "a", "mask": [[1, 0]]}), "has the range [1, 0], expected"),
        (chat({"role": "user", "content": "a", "mask": [0, 1]}), "has the range 0, expected"),
        (chat({"role": "user", "content": "a", "mask": "0-1"}), "is a string, expected [[start, stop], ...]"),
        ({**chat({"role": "user", "content": "a"}), "tools": "[]"}, "tools is no list of JSON schemas"),
    ],
)
def test_rows_that_mean_nothing_are_refused_with_their_place(columns: dict[str, Any], says: str) -> None:
    with pytest.raises(HalfbyteError) as caught:
        parsed(columns)
    assert str(caught.value).startswith("a.jsonl line 7: ")
    assert says in str(caught.value)

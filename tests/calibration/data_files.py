"""Data files and a tokenizer with a chat template for tests of calibration data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers

from tests.tiny import tiny_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}</s>\n{% endfor %}"
)


def chat_tokenizer(template: str = TEMPLATE) -> transformers.PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat_row(*turns: str, **columns: Any) -> dict[str, Any]:
    """Turns of user and assistant."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)], **columns}

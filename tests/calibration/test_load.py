from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.calibration.load import load_samples
from halfbyte.calibration.samples import CalibrationSet
from halfbyte.errors import HalfbyteError
from tests.calibration.data_files import chat_row, chat_tokenizer, write_rows
from tests.tiny import EOS, tiny_tokenizer


def load(data: Path | None, **settings: Any) -> CalibrationSet:
    return load_samples(data, chat_tokenizer(), **{"samples": 8, "length": 32, **settings})


def tokens(made: CalibrationSet) -> list[list[int]]:
    return [sample.ids.tolist() for sample in made.samples]


def test_samples_are_int64_tokens_with_a_bool_each(tmp_path: Path) -> None:
    made = load(
        write_rows(tmp_path / "a.jsonl", [{"text": "x" * 40}, chat_row("Hi", "Yes"), {"input_ids": [1, 2]}])
    )
    for sample in made.samples:
        assert (sample.ids.dtype, sample.counts.dtype) == (torch.int64, torch.bool)
        assert sample.ids.shape == sample.counts.shape
    assert len(made.samples) == 4


def test_the_report_is_what_the_samples_hold(tmp_path: Path) -> None:
    rows = [{"text": "x" * 40}, chat_row("Hi", "Yes"), chat_row("Hi", "y" * 90), {"text": ""}, chat_row()]
    made = load(write_rows(tmp_path / "a.jsonl", rows))
    report = made.report
    assert report.sources == (str(tmp_path / "a.jsonl"),)
    assert (report.requested, report.samples) == (8, len(made.samples))
    assert report.tokens == sum(map(len, tokens(made)))
    assert report.counted == sum(int(sample.counts.sum()) for sample in made.samples)
    assert (report.shortest, report.longest) == (min(map(len, tokens(made))), 32)
    assert (report.truncated, report.split, report.skipped) == (1, 1, {"empty": 2})
    assert report.notes == ("the data is enough for 4 of 8 samples",)
    assert json.loads(json.dumps(report.to_dict()))["counted"] == report.counted


def test_documents_are_packed_with_the_end_token_between(tmp_path: Path) -> None:
    made = load(write_rows(tmp_path / "a.jsonl", [{"text": "aaaa"}, {"text": "bbbb"}]))
    assert [tiny_tokenizer().decode(ids) for ids in tokens(made)] in ([f"aaaa{EOS}bbbb"], [f"bbbb{EOS}aaaa"])


def test_a_tokenizer_that_opens_texts_with_a_token_opens_every_window(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    made = load_samples(
        write_rows(tmp_path / "a.jsonl", [{"text": "x" * 100}]), tokenizer, samples=3, length=32
    )
    assert [ids[0] for ids in tokens(made)] == [tokenizer.bos_token_id] * 3
    assert [ids.count(tokenizer.bos_token_id) for ids in tokens(made)] == [1] * 3
    assert [len(ids) for ids in tokens(made)] == [32] * 3


def test_the_same_seed_gives_the_same_samples_and_another_one_others(tmp_path: Path) -> None:
    write_rows(tmp_path / "b.jsonl", [{"text": f"document {i} " * 9} for i in range(200)])
    (tmp_path / "a.txt").write_text("\n".join(f"line {i}" for i in range(9000)))
    first, again, other = (load(tmp_path, seed=seed) for seed in (3, 3, 4))
    assert tokens(first) == tokens(again)
    assert tokens(first) != tokens(other)
    assert first.report.sources == (str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"))


def test_every_row_can_be_drawn_and_none_twice(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "a.jsonl", [{"input_ids": [i, i // 250]} for i in range(250)])
    assert sorted(tokens(load(data, samples=250))) == [[i, i // 250] for i in range(250)]
    assert len(tokens(load(data, samples=7))) == 7


def test_several_lengths_are_dealt_in_turn(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 20_000)
    made = load(tmp_path / "a.txt", samples=6, length=[16, 2048, 512])
    assert [len(ids) for ids in tokens(made)] == [16, 2048, 512] * 2


def test_masked_roles_that_occur_nowhere_are_told(tmp_path: Path) -> None:
    made = load(write_rows(tmp_path / "a.jsonl", [chat_row("Hi", "Yes")]), masked_roles=("usr",))
    assert "no message has the masked role usr" in made.report.notes


def test_the_built_in_data_needs_no_network_and_knows_chats_where_the_tokenizer_does() -> None:
    made = load_samples(None, chat_tokenizer(), samples=80, length=[64, 512])
    assert len(made.samples) == 80
    assert made.report.masked["template"] > 0
    plain = load_samples(None, tiny_tokenizer(), samples=4, length=512)
    assert plain.report.masked == {}
    assert plain.report.notes == ("the tokenizer has no chat template: the built-in chats are left out",)
    assert [len(ids) for ids in tokens(plain)] == [512] * 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"length": 0}, "length 0 is too short, expected at least 1 token"),
        ({"length": [512, -1]}, "length -1 is too short"),
        ({"length": []}, "no length is given"),
        (
            {"length": [8, 4096], "context": 2048},
            "length 4096 is longer than the model's context of 2048 tokens",
        ),
        ({"samples": 0}, "0 samples are too few, expected at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(HalfbyteError, match=says):
        load(None, **settings)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b"", "a.jsonl: is empty"),
        ("a.txt", b"", "a.txt: is empty"),
        ("a.jsonl", b"\n\n", "a.jsonl: gives no sample (all rows are blank)"),
        ("a.txt", b" caf\xe9", "a.txt from byte 0: is no UTF-8 text"),
        ("a.jsonl", b'{"text": ""}\n', "a.jsonl: gives no sample (1 rows empty)"),
        (
            "a.jsonl",
            b'{"messages": [{"role": "system", "content": "x"}]}',
            "1 rows without a token that counts",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"text', "a.jsonl line 2: is no valid JSON"),
    ],
)
def test_data_that_gives_nothing_is_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HalfbyteError) as caught:
        load(tmp_path / name)
    assert says in str(caught.value)


NAMES = [
    "text",
    "content",
    "prompt",
    "completion",
    "messages",
    "conversations",
    "input_ids",
    "attention_mask",
    "tools",
]
SCALARS = st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=6)
MESSAGE_KEYS = ["role", "from", "content", "value", "mask", "weight", "tool_calls", "name"]
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(MESSAGE_KEYS), st.sampled_from(["user", "tool", "gpt"]) | SCALARS, max_size=4
    ),
    max_size=3,
)
VALUES = SCALARS | st.lists(st.integers(0, 263), max_size=5) | MESSAGES | st.lists(SCALARS, max_size=3)
LINES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3).map(lambda row: json.dumps(row).encode())


@settings(max_examples=150, deadline=None)
@given(lines=st.lists(LINES | st.binary(max_size=12), max_size=3), length=st.integers(1, 8))
def test_hostile_lines_give_samples_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], length: int
) -> None:
    file = tmp_path_factory.mktemp("hostile") / "a.jsonl"
    file.write_bytes(b"\n".join(lines))
    made, refusal = attempt(file, length)
    if refusal is not None:
        assert refusal.startswith(str(file))
        assert "\n" not in refusal
    if made is not None:
        assert all(1 <= len(ids) <= length for ids in tokens(made))
        assert all(0 <= token < len(tiny_tokenizer()) for ids in tokens(made) for token in ids)
        assert all(sample.counts.any() for sample in made.samples)


def attempt(file: Path, length: int) -> tuple[CalibrationSet | None, str | None]:
    try:
        return load(file, length=length), None
    except HalfbyteError as error:
        return None, str(error)

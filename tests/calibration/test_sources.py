from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.calibration.files import data_files, open_source
from halfbyte.calibration.sources import JsonLines, TextPieces
from halfbyte.errors import HalfbyteError
from tests.calibration.data_files import write_rows


def test_lines_are_numbered_as_in_the_file_and_blank_ones_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    rows = JsonLines(file).read(range(4))
    assert {number: (row.where, row.columns) for number, row in rows.items()} == {
        0: (f"{file} line 1", {"text": "a"}),
        3: (f"{file} line 4", {"text": "b"}),
    }


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": ', "is no valid JSON"),
        (b"[1]", "is a list, expected an object"),
        (b'"a"', "is a string, expected an object"),
        (b"\xff\xfe{}", "is no UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text": ' + b"1" * 5000 + b"}", "is JSON that cannot be read"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, says: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\n' + line + b"\n")
    assert JsonLines(file).read([0])
    with pytest.raises(HalfbyteError) as caught:
        JsonLines(file).read([1])
    assert str(caught.value).startswith(f"{file} line 2: ")
    assert says in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.sampled_from(list("ab\nü\U0001f600")), min_size=1, max_size=80), size=st.integers(1, 9)
)
def test_pieces_are_the_whole_text_within_their_size(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_bytes(text.encode())
    source = TextPieces(file, size)
    pieces = source.read(range(len(source)))
    whole = "".join(pieces[i].columns["text"] for i in sorted(pieces))
    assert whole.replace("\n", "") == text.replace("\n", "")
    assert all(len(row.columns["text"].encode()) <= 2 * size + 3 for row in pieces.values())


def test_pieces_end_with_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one two\nthree\n\nfour five six\nseven\n")
    source = TextPieces(file, 10)
    pieces = source.read(range(len(source)))
    assert [row.columns["text"] for row in pieces.values()] == ["one two\nthree", "four five six", "seven"]


def test_a_directory_means_its_data_files_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.txt", ".hidden.txt", "c/d.parquet", ".git/e.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    files, notes = data_files(tmp_path)
    assert [str(file.relative_to(tmp_path)) for file in files] == ["a.txt", "b.jsonl", "c/d.parquet"]
    assert notes == [f"{tmp_path}: left aside, of unknown type: notes.md"]


def test_paths_that_hold_nothing_usable_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match="does not exist"):
        data_files(tmp_path / "absent.jsonl")
    with pytest.raises(HalfbyteError, match=r"holds no data file; accepted are \.jsonl"):
        data_files(tmp_path)
    with pytest.raises(HalfbyteError, match=r"is of unknown type; accepted are \.jsonl"):
        data_files(write_rows(tmp_path / "a.csv", []))


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_large_file_is_never_in_memory(tmp_path: Path, name: str) -> None:
    line = b'{"text": "' + b"x" * 50_000 + b'"}\n'
    (tmp_path / name).write_bytes(line * 400)
    tracemalloc.start()
    source = open_source(tmp_path / name, 50_000)
    [row] = source.read([300]).values()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "x" * 50_000 in row.columns["text"]
    assert peak < 20 * len(line)

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.evaluation.texts import BUILT_IN, read_text


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_texts_are_in_the_package_and_small(name: str) -> None:
    text = read_text(name)
    assert 50_000 < len(text.encode()) < 200_000
    assert "Gutenberg" not in text


def test_the_default_is_prose() -> None:
    assert read_text() == read_text("prose")


def test_files_are_utf8_with_or_without_a_mark_and_any_line_end(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_bytes(b"\xef\xbb\xbfna\xc3\xafve\r\nline")
    assert read_text(file) == "naïve\nline"


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"na\xefve caf\xe9 text")
    with pytest.raises(HalfbyteError, match=r"latin\.txt: is no UTF-8 text \(byte 2"):
        read_text(tmp_path / "latin.txt")


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match=r"none\.txt: cannot be read \(No such file"):
        read_text(tmp_path / "none.txt")
    with pytest.raises(HalfbyteError, match="Is a directory"):
        read_text(tmp_path)

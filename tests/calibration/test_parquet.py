from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from halfbyte.calibration import parquet
from halfbyte.calibration.load import load_samples
from halfbyte.calibration.parquet import Parquet
from halfbyte.errors import HalfbyteError
from tests.calibration.data_files import chat_row, chat_tokenizer, write_rows


def write(path: Path, rows: list[dict[str, Any]], row_group: int = 3) -> Path:
    pa = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group)
    return path


def test_rows_are_found_across_row_groups_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 2)
    file = write(tmp_path / "a.parquet", [{"text": f"row {i}", "id": i} for i in range(10)], row_group=4)
    source = Parquet(file)
    assert len(source) == 10
    assert {i: (row.where, row.columns) for i, row in source.read([9, 0, 3, 4]).items()} == {
        i: (f"{file} row {i + 1}", {"text": f"row {i}"}) for i in (0, 3, 4, 9)
    }


def test_parquet_gives_the_samples_that_json_lines_give(tmp_path: Path) -> None:
    rows = [chat_row("Hi", f"Yes {i}") for i in range(5)]
    rows[1]["messages"][0]["mask"] = [[0, 1]]  # null in all other messages of the parquet file
    one = load_samples(write(tmp_path / "a.parquet", rows), chat_tokenizer(), samples=9, length=64)
    other = load_samples(write_rows(tmp_path / "a.jsonl", rows), chat_tokenizer(), samples=9, length=64)
    assert [s.ids.tolist() for s in one.samples] == [s.ids.tolist() for s in other.samples]
    assert [s.counts.tolist() for s in one.samples] == [s.counts.tolist() for s in other.samples]
    assert one.report.masked["span"] == 1


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [{"body": "x", "id": 1}])
    with pytest.raises(HalfbyteError, match=r"a\.parquet: has the columns body, id; accepted are input_ids"):
        Parquet(file)
    file.write_bytes(b"PAR1 nothing of the kind")
    with pytest.raises(HalfbyteError, match=r"a\.parquet: is no parquet file"):
        Parquet(file)


def test_without_pyarrow_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(HalfbyteError, match=r"pip install halfbyte\[parquet\]"):
        Parquet(tmp_path / "a.parquet")

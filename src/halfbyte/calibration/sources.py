"""Data files as numbered rows. A source knows where its rows lie and reads those that are asked for."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from halfbyte.calibration.rows import Row, kind
from halfbyte.errors import HalfbyteError


class Source(Protocol):
    """One file. ``len``: its rows."""

    def __len__(self) -> int: ...

    def read(self, rows: Iterable[int]) -> dict[int, Row]:
        """The rows by number, except blank ones. Errors: a row that cannot be read, by file and line or row."""


class JsonLines:
    """A JSON object on each line. One pass finds the lines; none but those asked for are parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts = array("q")
        with path.open("rb") as file:
            while True:
                start = file.tell()
                if not file.readline():
                    break
                self._starts.append(start)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, rows: Iterable[int]) -> dict[int, Row]:
        found: dict[int, Row] = {}
        with self.path.open("rb") as file:
            for row in sorted(rows):
                file.seek(self._starts[row])
                where = f"{self.path} line {row + 1}"
                if text := _decode(file.readline(), where).strip():
                    found[row] = Row(where, _parse_object(text, where))
        return found


class TextPieces:
    """A text file, cut where a line ends into pieces of ``size`` to twice as many bytes, the last of any size."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._starts = array("q", [0])
        end = path.stat().st_size
        with path.open("rb") as file:
            while (cut := _cut_after(file, self._starts[-1] + size, size)) < end:
                self._starts.append(cut)
        self._starts.append(end)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, rows: Iterable[int]) -> dict[int, Row]:
        found: dict[int, Row] = {}
        with self.path.open("rb") as file:
            for row in sorted(rows):
                start, stop = self._starts[row], self._starts[row + 1]
                file.seek(start)
                where = f"{self.path} from byte {start}"
                text = _decode(file.read(stop - start), where).replace("\r\n", "\n").strip("\n")
                if text:
                    found[row] = Row(where, {"text": text})
        return found


def _cut_after(file: BinaryIO, position: int, within: int) -> int:
    """Where the line at ``position`` ends, or else the first character after ``within`` more bytes starts."""
    file.seek(position)
    if file.readline(within).endswith(b"\n"):
        return file.tell()
    while (byte := file.read(1)) and byte[0] & 0xC0 == 0x80:
        pass
    return file.tell() - len(byte)


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HalfbyteError(f"{where}: is no UTF-8 text (byte {error.start}: {error.reason})") from None


def _parse_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise HalfbyteError(f"{where}: is no valid JSON ({error.msg} at character {error.pos + 1})") from None
    except RecursionError:
        raise HalfbyteError(f"{where}: is JSON nested too deeply to be read") from None
    except ValueError as error:
        raise HalfbyteError(f"{where}: is JSON that cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise HalfbyteError(f"{where}: is {kind(value)}, expected an object with columns")
    return value

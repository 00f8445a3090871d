"""Which files a data path means, and the source that reads each."""

from __future__ import annotations

from pathlib import Path

from halfbyte.calibration.parquet import Parquet
from halfbyte.calibration.sources import JsonLines, Source, TextPieces
from halfbyte.errors import HalfbyteError

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
TEXT = (".txt", ".text")
SUFFIXES = (*JSON_LINES, *PARQUET, *TEXT)


def data_files(path: Path) -> tuple[list[Path], list[str]]:
    """The files that ``path`` means, in the order of their names, and notes on those that were left aside.

    Of a directory these are all with a known suffix, also in directories below; hidden ones are not looked at.
    Errors: nothing there, an unknown suffix, a directory without data files.
    """
    if not path.is_dir():
        if not path.exists():
            raise HalfbyteError(f"{path}: does not exist; expected a data file or a directory of them")
        if path.suffix.lower() not in SUFFIXES:
            raise HalfbyteError(f"{path}: is of unknown type; accepted are {', '.join(SUFFIXES)}")
        return [path], []
    inside = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    usable = [file for file in inside if file.suffix.lower() in SUFFIXES]
    if not usable:
        raise HalfbyteError(f"{path}: holds no data file; accepted are {', '.join(SUFFIXES)}")
    others = [str(file.relative_to(path)) for file in inside if file not in usable]
    return usable, [f"{path}: left aside, of unknown type: {', '.join(others)[:200]}"] if others else []


def open_source(path: Path, piece: int) -> Source:
    """The source for a file by its suffix. piece: bytes of text that make one row of a text file.

    Errors: an empty file, one that cannot be read, and those of the sources.
    """
    suffix = path.suffix.lower()
    try:
        if path.stat().st_size == 0:
            raise HalfbyteError(f"{path}: is empty")
        if suffix in JSON_LINES:
            return JsonLines(path)
        return Parquet(path) if suffix in PARQUET else TextPieces(path, piece)
    except OSError as error:
        raise HalfbyteError(f"{path}: cannot be read ({error.strerror or error})") from None
